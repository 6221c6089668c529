"""The lazy index's table of contents: which record files there are, where their records are, and
which archives are searched for their images.

Invariants: the digest covers everything in the file but itself; a file of another version or with
another digest is refused. A record file's block file is named by all that its blocks follow from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace

import msgspec

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError
from dataservice.storage.index_folder import name_by_digest
from dataservice.storage.lazy.block import num_blocks
from dataservice.storage.lazy.block_store import BlockFileName
from dataservice.storage.listing import FoundFile, files_key
from dataservice.storage.manifest import INDEX_VERSION, ArchiveEntry, TableFile
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import write_bytes
from dataservice.storage.taking import Taken

LAZY_VERSION = 2
LAZY_NAME = "lazy.json"
BLOCKS_PREFIX = "blocks-"


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyShard:
    """One record file."""

    name: str
    url: str
    size_bytes: int
    mtime_ns: int
    packing: str
    unpacked_bytes: int
    crc32: int
    """Of the file as it is stored."""
    num_records: int
    """All that the file has."""
    taken: Taken | None
    """Of them; None: all."""
    offsets: TableFile
    """Of all records; columns OFFSETS."""
    beside: tuple[FoundFile, ...]
    """Archives of its stem."""
    blocks: str
    """Name of its block file."""

    @property
    def num_rows(self) -> int:
        return self.num_records if self.taken is None else self.taken.num_rows

    def ref(self, source: str) -> ShardRef:
        return ShardRef(
            source=source,
            name=self.name,
            url=self.url,
            size_bytes=self.size_bytes,
            mtime_ns=self.mtime_ns,
            packing=self.packing,
            unpacked_bytes=self.unpacked_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LazySource:
    name: str
    root: str
    """Folder that the shards' names are relative to."""
    fingerprint: str
    """`fingerprints.source_fingerprint`."""
    roots: tuple[FoundFile, ...]
    """Archives and folders in which images are looked up, in order."""
    shards: tuple[LazyShard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyManifest:
    version: int
    counter: str
    """Fingerprint of what counts the tokens."""
    archives: tuple[ArchiveEntry, ...]
    """All that are searched but folders and those that are bad as a whole."""
    sources: tuple[LazySource, ...]
    digest: str = ""

    def block_files(self) -> list[BlockFileName]:
        """By number of the record file, over all sources."""
        return [
            BlockFileName(name=shard.blocks, num_blocks=num_blocks(shard.num_rows))
            for source in self.sources
            for shard in source.shards
        ]


def blocks_name(files: SourceFiles, shard: LazyShard, roots: str, counter: str) -> str:
    """Of the file with the blocks of a record file; `roots` is the `files_key` of the source's
    image roots."""
    parts = [
        LAZY_VERSION,
        INDEX_VERSION,
        counter,
        asdict(files.format),
        [files.name, files.strip_prefix, files.add_prefix],
        shard.taken and asdict(shard.taken),
        [shard.url, shard.size_bytes, shard.mtime_ns, shard.crc32],
        [files_key(shard.beside), roots],
    ]
    return name_by_digest(BLOCKS_PREFIX, json.dumps(parts))


def write_lazy_manifest(index_dir: str, manifest: LazyManifest) -> LazyManifest:
    """Returns it with its digest; nothing is written where it is there already."""
    manifest = replace(manifest, digest=_digest(manifest))
    with contextlib.suppress(StaleIndexError):
        if read_lazy_manifest(index_dir).digest == manifest.digest:
            return manifest
    data = msgspec.json.encode(manifest)
    write_bytes(os.path.join(index_dir, LAZY_NAME), data)
    return manifest


def read_lazy_manifest(index_dir: str) -> LazyManifest:
    """Raises StaleIndexError when there is none, or it is damaged or of another version."""
    path = os.path.join(index_dir, LAZY_NAME)
    try:
        with open(path, "rb") as file:
            manifest = msgspec.json.decode(file.read(), type=LazyManifest)
    except FileNotFoundError:
        raise StaleIndexError(f"no lazy index in {index_dir}; run `dataservice index`") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise StaleIndexError(f"{path} cannot be read ({error}); index again") from error
    if manifest.version != LAZY_VERSION or manifest.digest != _digest(manifest):
        raise StaleIndexError(f"{path} is damaged or of another version; index again")
    return manifest


def _digest(manifest: LazyManifest) -> str:
    return hashlib.sha256(msgspec.json.encode(replace(manifest, digest=""))).hexdigest()
