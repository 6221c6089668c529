"""Which of the kinds that are linted a file is: by its name, and by its content where that is none.

Invariants: a run takes record files and archives by their names, so a file that is named as one of
them, or as a picture, and is none is a bad one; of which format a picture is its name never says.
At most 1 KiB of the beginning and 64 KiB of the end are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from dataservice.storage.signatures import HEAD_BYTES, container_format, picture_format

FileKind = Literal["image", "zip", "tar", "records"]

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> those bytes, fewer at the end."""

_RECORDS = re.compile(r"\.(jsonl|ndjson|json)(\.(gz|zst|zip))?$|\.parquet$", re.IGNORECASE)
_PICTURES = re.compile(
    r"\.(jpe?g|jfif|png|apng|webp|gif|bmp|tiff?|avif|heic|heif|jp2|j2k|ppm|pgm|pbm|pnm|mpo|svg|ico)$",
    re.IGNORECASE,
)
_TARS = re.compile(r"\.(tar(\.\w+)?|tgz)$", re.IGNORECASE)
_END_OF_ZIP = b"PK\x05\x06"
_LONGEST_END = 22 + 0xFFFF


def kind_of(name: str, read: ReadAt, size_bytes: int) -> FileKind:
    """Of a file with that name and content. Raises as `read`."""
    named = kind_by_name(name)
    if named is not None:
        return named
    head = read(0, min(HEAD_BYTES, size_bytes))
    if picture_format(head) not in (None, "PPM"):
        return "image"
    container = container_format(head)
    if container == "zip":
        return "zip"
    if container == "tar":
        return "tar"
    if container == "parquet" or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "records"
    tail_bytes = min(_LONGEST_END, size_bytes)
    return "zip" if _END_OF_ZIP in read(size_bytes - tail_bytes, tail_bytes) else "image"


def kind_by_name(name: str) -> FileKind | None:
    """As its suffix says; None for a suffix that says nothing."""
    if _RECORDS.search(name):
        return "records"
    if _PICTURES.search(name):
        return "image"
    if _TARS.search(name):
        return "tar"
    return "zip" if name.lower().endswith(".zip") else None
