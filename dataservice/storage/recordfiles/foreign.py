"""What a file is that was given as a record file and is none, and what to do with it.

Invariants: a pure function of the name and of the first 64 KiB of the unpacked content; a file that
is named as a record file is one unless it begins as another known format does, any other file if a
line of it begins as JSON.
"""

from __future__ import annotations

import posixpath
import re
from codecs import getincrementaldecoder

from dataservice.storage.backends import without_query
from dataservice.storage.packed.unpacking import packing_of
from dataservice.storage.recordfiles.finders import BYTE_ORDER_MARK
from dataservice.storage.signatures import container_format, described, picture_format

HEAD_BYTES = 64 * 1024
"""What is looked at, at most."""

_KNOWN = "records are .jsonl or .json, both also as .gz, .zst or .zip, or .parquet"
_IMAGES = "a folder or archive of images goes into `images` of the source"
_RECORDS = re.compile(r"\.(jsonl|ndjson|json)$", re.IGNORECASE)
_REMEDIES = {
    "tar": "of a WebDataset tar the captions are not read: give them as a .jsonl in `records`, "
    "and the tar in `images`",
    "zip": "an archive of images goes into `images` of the source; a zip with one record file in "
    "it is named .jsonl.zip",
    "gz": "records in gzip are named .jsonl.gz; a compressed tar is unpacked to .tar and goes into "
    "`images` of the source",
    "zst": "records in zstandard are named .jsonl.zst; a compressed tar is unpacked to .tar and "
    "goes into `images` of the source",
    "parquet": "name it .parquet",
}
_COMPRESSED_TAR = (
    "unpack it to .tar; of a WebDataset tar the captions are not read: give them as a .jsonl in "
    "`records`, and the tar in `images`"
)


def why_no_records(url: str, head: bytes) -> str:
    """The reason, for a person, of a file that is none of records; empty for one that is."""
    path = without_query(url)
    named = path.rpartition(".")[0] if packing_of(path) else path
    what = described(head)
    if what is None and not _RECORDS.search(named) and not _may_be_json(head):
        what = _other(head)
    if what is None:
        return ""
    name = repr(posixpath.basename(path))
    remedy = _remedy(head, is_packed=named != path)
    return f"{name} is {what}, not a record file: {_KNOWN}{remedy and '; '}{remedy}"


def _remedy(head: bytes, *, is_packed: bool) -> str:
    container = container_format(head)
    if container == "tar" and is_packed:
        return _COMPRESSED_TAR
    if container:
        return _REMEDIES[container]
    return _IMAGES if picture_format(head) else ""


def _may_be_json(head: bytes) -> bool:
    lines = head.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    return not head.strip() or any(line.lstrip()[:1] in (b"{", b"[") for line in lines)


def _other(head: bytes) -> str:
    try:
        is_text = "\0" not in getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        is_text = False
    return "a text that is not JSON" if is_text else f"no text (first bytes: {head[:8].hex(' ')})"
