"""Ranges of objects over HTTP, as answered by servers that keep to RFC 9110 and by others.

Invariants: of an answer at most `offset + size` bytes are read, of them at most `SKIPPED_MOST` in
vain; the size and the version of an object come from the same answer as its bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from datetime import datetime

from dataservice.storage.backends import ObjectStat
from dataservice.storage.remote.failures import LastingError, passing

SKIPPED_MOST = 16 * 1024**2
"""Of a server that sends an object from its start only; what lies behind is refused."""

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_SECOND_NS = 1_000_000_000


def range_header(offset: int, size: int) -> str:
    return f"bytes={offset}-{offset + size - 1}"


def version_stat(size_bytes: int, changed: datetime | None, etag: str) -> ObjectStat:
    """The ETag goes into the digits of mtime_ns below the second, which HTTP dates do not have."""
    tag = etag.removeprefix("W/").strip('"')
    mark = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "big") if tag else 0
    if changed is None:
        return ObjectStat(size_bytes=size_bytes, mtime_ns=mark >> 2)
    mtime_ns = int(changed.timestamp()) * _SECOND_NS + mark % _SECOND_NS
    return ObjectStat(size_bytes=size_bytes, mtime_ns=mtime_ns)


def total_bytes(content_range: str) -> int | None:
    """The object's size from a Content-Range such as "bytes 0-99/2560", or "bytes */0"."""
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    return int(match[3]) if match else None


async def read_body(
    url: str,
    read: Callable[[int], Awaitable[bytes]],
    *,
    content_range: str | None,
    total: int,
    offset: int,
    size: int,
) -> bytes:
    """The wanted range of an answer; `read(n)` gives up to n bytes of its body, b"" at the end.

    `content_range` None: the server sent the whole object, `total` bytes. Raises StorageError for
    an answer that is cut off or another range, LastingError for one that would be read in vain.
    """
    wanted = min(size, total - offset)
    if wanted <= 0:
        return b""
    skipped = 0
    if content_range is None:
        if offset and offset + wanted > SKIPPED_MOST:
            raise LastingError(
                f"the server ignores range requests, and {wanted} bytes at {offset} are wanted: "
                "serve the file by one that has them (nginx, S3), or copy it to local storage"
            )
        skipped = offset
    elif not content_range.strip().startswith(f"bytes {offset}-{offset + wanted - 1}/"):
        raise passing(url, f"asked for {wanted} bytes at {offset}, the server sent {content_range}")
    body = bytearray()
    while len(body) < skipped + wanted:
        part = await read(skipped + wanted - len(body))
        if not part:
            raise passing(url, f"the answer ends {skipped + wanted - len(body)} bytes early")
        body += part
    return bytes(memoryview(body)[skipped:])
