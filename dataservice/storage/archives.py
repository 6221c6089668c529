"""Looking up a record's images while an index is built: which archive, which member, which size.

Invariants: a zip's directory is read once however many JSONL files refer to it, and a member's
header once; both are kept beside the index, so that a later build reads neither again. Names are
looked up in the zip beside the JSONL file first, then in the roots in their order; of two members
of one name in a zip the last counts. A name never leaves its root.
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, DataError, ImageError, RecordError, StaleIndexError
from dataservice.storage import zips
from dataservice.storage.backends import ObjectStat
from dataservice.storage.listing import FoundFile
from dataservice.storage.manifest import INDEX_VERSION, ArchiveEntry, TableFile
from dataservice.storage.objects import ObjectStore
from dataservice.storage.probe import probe
from dataservice.storage.tables import MEMBERS, SIZES, Table, digest_arrays, to_arrays, write_table


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundImage:
    """Where an image is and how large it is, upright."""

    archive: ZipArchive | Folder
    member: int
    """Row of the zip's member table; -1 in a folder."""
    name: str
    """Within the archive or folder."""
    stat: ObjectStat | None
    """Of a folder's file."""
    width: int
    height: int


class MissingImage(RecordError):
    """No archive or folder has an image of that name."""


def zip_key(file: FoundFile) -> str:
    """Names the index files of one version of an archive."""
    text = f"{INDEX_VERSION}\0{file.url}\0{file.stat.size_bytes}\0{file.stat.mtime_ns}"
    return "zip-" + hashlib.sha256(text.encode()).hexdigest()[:24]


class ZipArchive:
    """A zip's member table and the picture sizes found so far. Raises ArchiveError when bad."""

    def __init__(
        self, file: FoundFile, store: ObjectStore, index_dir: str, *, deadline_s: float
    ) -> None:
        self.file = file
        self._store = store
        self._index_dir = index_dir
        self._deadline_s = deadline_s
        self._key = zip_key(file)
        self._shard = ShardRef(
            source="",
            name=posixpath.basename(file.url),
            url=file.url,
            size_bytes=file.stat.size_bytes,
            mtime_ns=file.stat.mtime_ns,
        )
        mapped = self._kept("members", MEMBERS) or self._read_members()
        self.members = mapped.columns
        self.names = mapped.strings("name")
        self.num_members = mapped.num_rows
        self.width, self.height = self._known_sizes()
        self._failed: dict[int, DataError] = {}
        self._changed = False

    def image(self, member: int) -> FoundImage:
        """Raises ArchiveError, ImageError, StorageError."""
        name = self.names[member].as_py()
        if not self.width[member]:
            if member in self._failed:
                raise self._failed[member]
            try:
                header = probe(self._part_reader(member, name), self._size(member))
            except (ArchiveError, ImageError) as error:
                self._failed[member] = error
                raise
            self.width[member], self.height[member] = header.width, header.height
            self._changed = True
        return FoundImage(
            archive=self,
            member=member,
            name=name,
            stat=None,
            width=int(self.width[member]),
            height=int(self.height[member]),
        )

    def save_sizes(self) -> None:
        """Keep the picture sizes for later builds."""
        if self._changed:
            columns = {"width": self.width, "height": self.height}
            write_table(self._path("sizes"), SIZES, to_arrays(SIZES, columns))
            self._changed = False

    @functools.cached_property
    def entry(self) -> ArchiveEntry:
        path = self._path("members")
        columns = [
            pa.array(self.members[n]) for n in MEMBERS.names if n not in ("name", "mtime_ns")
        ]
        return ArchiveEntry(
            kind="zip",
            url=self.file.url,
            size_bytes=self.file.stat.size_bytes,
            mtime_ns=self.file.stat.mtime_ns,
            num_members=self.num_members,
            digest=digest_arrays([*columns, self.names]),
            members=TableFile(name=os.path.basename(path), size_bytes=os.path.getsize(path)),
        )

    def _path(self, what: str) -> str:
        return os.path.join(self._index_dir, f"{self._key}.{what}.arrow")

    def _size(self, member: int) -> int:
        return int(self.members["size_bytes"][member])

    def _kept(self, what: str, schema: Any) -> Table | None:
        """A table of an earlier build; a damaged one is made anew."""
        if not os.path.exists(self._path(what)):
            return None
        try:
            return Table(self._path(what), schema)
        except StaleIndexError:
            return None

    def _read_members(self) -> Table:
        found = zips.read_directory(self._read, self.file.stat.size_bytes)
        columns = {name: getattr(found, name) for name in MEMBERS.names if name != "mtime_ns"}
        columns["mtime_ns"] = np.zeros(len(found.name), dtype=np.int64)
        write_table(self._path("members"), MEMBERS, to_arrays(MEMBERS, columns))
        return Table(self._path("members"), MEMBERS)

    def _known_sizes(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        known = self._kept("sizes", SIZES)
        if known is not None and known.num_rows == self.num_members:
            return known.columns["width"].copy(), known.columns["height"].copy()
        empty = np.zeros(self.num_members, dtype=np.uint32)
        return empty, empty.copy()

    def _read(self, offset: int, size: int) -> bytes:
        data = self._store.read(self.file.url, offset, size, deadline_s=self._deadline_s)
        if len(data) != size:
            raise ArchiveError(
                f"ends at {offset + len(data)}, listed with {self.file.stat.size_bytes} bytes",
                shard=self._shard.name,
            )
        return data

    def _part_reader(self, member: int, name: str) -> Callable[[int, int], bytes]:
        size = self._size(member)
        method = int(self.members["method"][member])
        problem = int(self.members["problem"][member])
        if problem:
            reason = zips.describe_problem(problem, method, size)
            raise ArchiveError(reason, shard=self._shard.name, member=name)
        spec = ImageSpec(
            shard=0,
            member=name,
            offset=int(self.members["offset"][member]),
            stored_bytes=int(self.members["stored_bytes"][member]),
            size_bytes=size,
            method=method,
            crc32=int(self.members["crc32"][member]),
            width=0,
            height=0,
            target_width=0,
            target_height=0,
        )
        if method == zips.STORED:
            return self._stored_reader(spec)
        return _InflatedPrefix(lambda limit: zips.read_stored(self._read, spec, self._shard, limit))

    def _stored_reader(self, spec: ImageSpec) -> Callable[[int, int], bytes]:
        begin = -1

        def read(offset: int, size: int) -> bytes:
            nonlocal begin
            if begin < 0 or offset == 0:
                begin, data = zips.read_stored(self._read, spec, self._shard, offset + size)
                return data[offset:]
            return self._read(begin + offset, max(min(size, spec.size_bytes - offset), 0))

        return read


class _InflatedPrefix:
    """Parts of a deflated member; inflates no further than asked for."""

    def __init__(self, read_stored: Callable[[int], tuple[int, bytes]]) -> None:
        self._read_stored = read_stored
        self._data = b""
        self._done = False

    def __call__(self, offset: int, size: int) -> bytes:
        want = offset + size
        limit = max(want, 4096)
        while len(self._data) < want and not self._done:
            stored = self._read_stored(limit)[1]
            inflater = zlib.decompressobj(-15)
            try:
                self._data = inflater.decompress(stored, want)
            except zlib.error as error:
                raise ArchiveError(f"cannot be inflated: {error}") from None
            self._done = inflater.eof or (len(stored) < limit and len(self._data) < want)
            limit *= 4
        return self._data[offset:want]


class Folder:
    """Images that are plain files below one folder."""

    def __init__(self, url: str, store: ObjectStore, *, deadline_s: float) -> None:
        self.url = url
        self._store = store
        self._deadline_s = deadline_s

    def stat(self, name: str) -> ObjectStat | None:
        """None when there is no such file."""
        try:
            stat = self._store.stat(posixpath.join(self.url, name), deadline_s=self._deadline_s)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.is_folder else stat

    def image(self, name: str, stat: ObjectStat) -> FoundImage:
        """Raises ArchiveError, ImageError, StorageError."""
        if stat.size_bytes > zips.MAX_MEMBER_BYTES:
            raise ArchiveError(zips.describe_problem(zips.TOO_LARGE, -1, stat.size_bytes))
        url = posixpath.join(self.url, name)
        header = probe(
            lambda offset, size: self._store.read(url, offset, size, deadline_s=self._deadline_s),
            stat.size_bytes,
        )
        return FoundImage(
            archive=self,
            member=-1,
            name=name,
            stat=stat,
            width=header.width,
            height=header.height,
        )


class _MemberLookup:
    """Names of several zips, sorted by hash: 14 bytes a member, one binary search a name."""

    def __init__(self, archives: Sequence[ZipArchive]) -> None:
        self._archives = archives
        hashes = [_name_hashes(archive) for archive in archives]
        number = np.repeat(np.arange(len(archives), dtype=np.uint16), [len(h) for h in hashes])
        members = [np.arange(len(h), dtype=np.uint32)[::-1] for h in hashes]  # last one first
        every = np.concatenate([h[::-1] for h in hashes]) if hashes else np.zeros(0, np.uint64)
        order = np.argsort(every, kind="stable")
        self._hash = every[order]
        self._archive = number[order]
        self._member = np.concatenate(members)[order] if members else np.zeros(0, np.uint32)

    def find(self, name: str) -> tuple[ZipArchive, int] | None:
        wanted = np.uint64(_hash(name))
        at = int(np.searchsorted(self._hash, wanted))
        while at < len(self._hash) and self._hash[at] == wanted:
            archive = self._archives[self._archive[at]]
            member = int(self._member[at])
            if plain_name(archive.names[member].as_py()) == name:
                return archive, member
            at += 1
        return None


class ImageFinder:
    """The images of one source's JSONL file. Thread-safe."""

    def __init__(self, steps: Sequence[ZipArchive | Folder | ArchiveError]) -> None:
        self._steps: list[_MemberLookup | Folder] = []
        self._unreadable = [str(step) for step in steps if isinstance(step, ArchiveError)]
        self._searched = len(steps)
        usable = [step for step in steps if not isinstance(step, ArchiveError)]
        for is_zip, group in groupby(usable, key=lambda step: isinstance(step, ZipArchive)):
            if is_zip:
                self._steps.append(_MemberLookup([s for s in group if isinstance(s, ZipArchive)]))
            else:
                self._steps += [s for s in group if isinstance(s, Folder)]

    @property
    def has_folders(self) -> bool:
        return any(isinstance(step, Folder) for step in self._steps)

    def find(self, name: str) -> FoundImage:
        """Raises DataError with the reason, MissingImage when it is nowhere, StorageError."""
        plain = safe_name(name)
        try:
            for step in self._steps:
                if isinstance(step, Folder):
                    stat = step.stat(plain)
                    if stat is not None:
                        return step.image(plain, stat)
                elif (found := step.find(plain)) is not None:
                    return found[0].image(found[1])
        except (ArchiveError, ImageError) as error:
            raise RecordError(f"image {name!r}: {error}") from error
        because = "".join(f"; {reason}" for reason in self._unreadable)
        raise MissingImage(f"no such image: {name!r}, places searched: {self._searched}{because}")


def safe_name(name: str) -> str:
    """The name as archives are searched for it. Raises RecordError for one that is refused."""
    if "://" in name or name.startswith("data:"):
        raise RecordError(f"image {name[:60]!r} is a URL; only files of the image roots are read")
    if not zips.is_safe_name(name):
        raise RecordError(f"image {name!r} is absolute or leaves its root; it is not read")
    plain = plain_name(name)
    if not plain:
        raise RecordError(f"image {name!r} names no file")
    return plain


def plain_name(name: str) -> str:
    """Without "." and empty parts."""
    if "./" not in name and "//" not in name and not name.endswith("."):
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _hash(name: str) -> int:
    return hash(name) & 0xFFFFFFFFFFFFFFFF


def _name_hashes(archive: ZipArchive) -> NDArray[np.uint64]:
    names: Any = archive.names
    return np.fromiter(
        (_hash(plain_name(name)) for name in names.to_pylist()),
        dtype=np.uint64,
        count=archive.num_members,
    )
