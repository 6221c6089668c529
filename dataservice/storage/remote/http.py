"""Files of a web server, by fsspec's HTTP client: sizes and ranges from one GET each.

Invariants: a server needs no HEAD (a signed URL allows GET alone); bytes count as stored, so an
answer that the server compressed on the way is refused; nothing is read beyond what is asked for.
"""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from dataservice.storage.backends import ObjectStat
from dataservice.storage.remote.failures import LastingError, http_failure
from dataservice.storage.remote.ranges import range_header, read_body, total_bytes, version_stat


def options(configured: dict[str, Any]) -> dict[str, Any]:
    """Of the file system, besides those of fsspec's config."""
    client = dict(configured.get("client_kwargs") or {})
    headers = {"Accept-Encoding": "identity", **(client.get("headers") or {})}
    return {"client_kwargs": {**client, "headers": headers, "auto_decompress": False}}


async def stat(filesystem: Any, url: str) -> ObjectStat:
    return (await read(filesystem, url, 0, 1))[1]


def listed(info: dict[str, Any]) -> None:
    """Pages of links say nothing of the files."""


async def list_folder(filesystem: Any, path: str, prefix: str) -> None:
    """A server need not have a page for a folder."""


async def read(filesystem: Any, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
    session = await filesystem.set_session()
    headers = {"Range": range_header(offset, max(size, 1))}
    async with session.get(filesystem.encode_url(url), headers=headers) as answer:
        content_range = answer.headers.get("Content-Range")
        if answer.status == 416 and (total := total_bytes(content_range or "")) is not None:
            return b"", await stat(filesystem, url) if total else _stat(answer, 0)
        if answer.status >= 400:
            raise http_failure(url, answer.status, answer.reason or "")
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity" and not url.partition("?")[0].endswith((".gz", ".zst")):
            raise LastingError(f"the server compresses files on the way ({encoding})")
        partial = answer.status == 206
        total = total_bytes(content_range or "") if partial else answer.content_length
        if total is None:
            raise LastingError("the server does not say how large the file is")
        data = await read_body(
            url,
            answer.content.read,
            content_range=content_range if partial else None,
            total=total,
            offset=offset,
            size=size,
        )
        return data, _stat(answer, total)


def _stat(answer: Any, size_bytes: int) -> ObjectStat:
    return version_stat(
        size_bytes, _date(answer.headers.get("Last-Modified")), answer.headers.get("ETag", "")
    )


def _date(text: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(text) if text else None
    except ValueError:
        return None
