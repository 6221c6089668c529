"""Objects of S3 and of stores that speak it, by s3fs: a GetObject with a range a read.

Invariants: no listing is kept; no request is repeated here (objects.py does, within the deadline);
the version comes from the same answer as the bytes.
"""

from __future__ import annotations

from typing import Any

from dataservice.storage.backends import ObjectStat
from dataservice.storage.remote.ranges import range_header, read_body, total_bytes, version_stat


def options(configured: dict[str, Any]) -> dict[str, Any]:
    """Of the file system, besides those of fsspec's config."""
    once = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
    return {
        "use_listings_cache": False,
        "config_kwargs": {**once, **(configured.get("config_kwargs") or {})},
    }


async def stat(filesystem: Any, path: str) -> ObjectStat:
    info = await filesystem._info(path)
    if info["type"] == "directory":
        return ObjectStat(size_bytes=0, mtime_ns=0, is_folder=True)
    return listed(info)


def listed(info: dict[str, Any]) -> ObjectStat:
    """Of an object as s3fs describes it, in a listing or by its name."""
    return version_stat(int(info["size"]), info["LastModified"] or None, info["ETag"] or "")


async def list_folder(filesystem: Any, path: str, prefix: str) -> list[dict[str, Any]]:
    """The objects and folders in a folder whose names begin with `prefix`: 1000 a request."""
    found: list[dict[str, Any]] = await filesystem._lsdir(path, prefix=prefix)
    return found


async def read(filesystem: Any, path: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
    bucket, key, version = filesystem.split_path(path)
    named = {"VersionId": version} if version else {}
    try:
        answer = await filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=range_header(offset, max(size, 1)), **named
        )
    except OSError as error:
        if "InvalidRange" not in str(error.__cause__):
            raise
        return b"", await stat(filesystem, path)  # at or past the end
    body = answer["Body"]
    try:
        content_range = answer.get("ContentRange")
        total = total_bytes(content_range or "")
        whole = total is None
        data = await read_body(
            f"s3://{bucket}/{key}",
            body.read,
            content_range=None if whole else content_range,
            total=answer["ContentLength"] if total is None else total,
            offset=offset,
            size=size,
        )
        return data, version_stat(
            answer["ContentLength"] if total is None else total,
            answer.get("LastModified"),
            answer.get("ETag", ""),
        )
    finally:
        body.close()
