"""The index's table of contents: a JSON file that names every shard, archive and table.

Invariants: the digest covers everything in the file but itself; a file of another version or with
another digest is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from dataservice.errors import StaleIndexError
from dataservice.storage.tables import write_bytes

INDEX_VERSION = 5
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """One Arrow file, by its name in the index folder."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveEntry:
    kind: str
    """"zip", "tar" or "folder"; "inline": images that stand in the records of the file `url`;
    "parquet": those in a column of it."""
    url: str
    size_bytes: int
    """0 for a folder; its files have their own sizes in the table."""
    mtime_ns: int
    num_members: int
    directory_crc32: int
    """Of a zip's or tar's directory as it is stored, else 0."""
    members: TableFile | None
    names: TableFile | None
    """The members' names; both None where images stand in the record file itself."""
    column: str = ""
    """Of a Parquet file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One record file. Token counts are sums over its good samples."""

    name: str
    url: str
    size_bytes: int
    mtime_ns: int
    packing: str
    """As `packspec.ShardRef.packing`."""
    unpacked_bytes: int
    crc32: int
    """Of the file as it is stored."""
    num_samples: int
    """Rows, those of rejected records included."""
    num_text_samples: int
    """Good ones without images."""
    num_rejected: int
    num_images: int
    text_tokens: int
    loss_tokens: int
    digest: str
    """Of its tables and of the archives they refer to."""
    samples: TableFile
    images: TableFile
    archives: tuple[int, ...]
    """Positions in `Manifest.archives`; the images table counts in this list."""

    @property
    def num_vision_samples(self) -> int:
        """Good ones with images."""
        return self.num_samples - self.num_text_samples - self.num_rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    name: str
    root: str
    """Folder that the shards' names are relative to."""
    fingerprint: str
    """`fingerprints.source_fingerprint`."""
    shards: tuple[ShardEntry, ...]

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    version: int
    counter: str
    """Fingerprint of what counted the tokens."""
    archives: tuple[ArchiveEntry, ...]
    sources: tuple[SourceEntry, ...]
    digest: str


def make_manifest(
    *, counter: str, archives: tuple[ArchiveEntry, ...], sources: tuple[SourceEntry, ...]
) -> Manifest:
    body = {
        "version": INDEX_VERSION,
        "counter": counter,
        "archives": [asdict(archive) for archive in archives],
        "sources": [asdict(source) for source in sources],
    }
    return Manifest(
        version=INDEX_VERSION,
        counter=counter,
        archives=archives,
        sources=sources,
        digest=hashlib.sha256(_canonical(body)).hexdigest(),
    )


def write_manifest(index_dir: str, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=1).encode()
    write_bytes(os.path.join(index_dir, MANIFEST_NAME), text)


def read_manifest(index_dir: str) -> Manifest:
    """Raises StaleIndexError when there is none, or it is damaged or of another version."""
    path = os.path.join(index_dir, MANIFEST_NAME)
    try:
        with open(path, "rb") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise StaleIndexError(f"no index in {index_dir}; run `dataservice index`") from None
    except (OSError, ValueError) as error:
        raise StaleIndexError(f"{path} cannot be read ({error}); index again") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != INDEX_VERSION:
        raise StaleIndexError(
            f"{path} is of version {version}, this program reads {INDEX_VERSION}; "
            "run `dataservice index` again"
        )
    digest = data.pop("digest", None)
    if digest != hashlib.sha256(_canonical(data)).hexdigest():
        raise StaleIndexError(f"{path} is damaged: its digest does not match; index again")
    return Manifest(
        version=version,
        counter=data["counter"],
        archives=tuple(archive_from_json(entry) for entry in data["archives"]),
        sources=tuple(_source(entry) for entry in data["sources"]),
        digest=digest,
    )


def shard_from_json(entry: dict[str, Any]) -> ShardEntry:
    return ShardEntry(
        **{
            **entry,
            "samples": TableFile(**entry["samples"]),
            "images": TableFile(**entry["images"]),
            "archives": tuple(entry["archives"]),
        }
    )


def archive_from_json(entry: dict[str, Any]) -> ArchiveEntry:
    return ArchiveEntry(
        **{
            **entry,
            "members": entry["members"] and TableFile(**entry["members"]),
            "names": entry["names"] and TableFile(**entry["names"]),
        }
    )


def _source(entry: dict[str, Any]) -> SourceEntry:
    return SourceEntry(**{**entry, "shards": tuple(map(shard_from_json, entry["shards"]))})


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
