"""What identifies the data of a source, computed without counting anything.

Invariants: content and settings count, places and times do not, so a copied data set has the same
fingerprint; the full and the lazy index compute the same one from the same data.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dataservice.storage.listing import FoundFile, name_below
from dataservice.storage.sources import SourceFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFileIdentity:
    name: str
    """Below the source's root."""
    size_bytes: int
    crc32: int
    """Of the file as it is stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveIdentity:
    """Of an archive that may be searched, bad ones included; a folder has none."""

    url: str
    size_bytes: int
    directory_crc32: int
    """0 of an archive that is bad as a whole."""


def identity_of(file: FoundFile, opened: object) -> ArchiveIdentity | None:
    """`opened` is an `archives.Archive`, or the ArchiveError of one; None for a folder."""
    if file.stat.is_folder:
        return None
    return ArchiveIdentity(
        url=file.url,
        size_bytes=file.stat.size_bytes,
        directory_crc32=getattr(opened, "directory_crc32", 0),
    )


def source_fingerprint(
    files: SourceFiles,
    root: str,
    records: Sequence[RecordFileIdentity],
    archives: Sequence[ArchiveIdentity],
) -> str:
    """Hex SHA-256. `archives` are the image roots in their order, then those beside the record
    files in theirs; of one that is there twice the first counts."""
    distinct = {archive.url: archive for archive in archives}.values()
    parts = {
        "format": asdict(files.format),
        "prefixes": [files.strip_prefix, files.add_prefix],
        "take": files.take,
        "records": [[file.name, file.size_bytes, file.crc32] for file in records],
        "archives": [
            [_name(root, archive.url), archive.size_bytes, archive.directory_crc32]
            for archive in distinct
        ],
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _name(root: str, url: str) -> str:
    below = name_below(root, url)
    return posixpath.basename(url) if below == url else below
