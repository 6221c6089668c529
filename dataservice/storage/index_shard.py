"""The tables of one record file: its records read, counted, their images looked up, and written.

Invariants: rows are in the order of the records; what is written follows from the inputs named in
`shard_key` alone, except images of folders, whose files are compared again by `load_shard`; the
JSON file that makes a shard's tables count is written last; memory is bounded whatever the length
of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import StaleIndexError
from dataservice.storage.archives import Folder, ImageFinder
from dataservice.storage.fingerprints import ArchiveIdentity
from dataservice.storage.folder_table import FolderTable, same_files
from dataservice.storage.index_folder import name_by_digest
from dataservice.storage.index_rows import FolderFile, RowReader, Rows
from dataservice.storage.jsonl import Line
from dataservice.storage.listing import FoundFile, files_key
from dataservice.storage.manifest import (
    INDEX_VERSION,
    ArchiveEntry,
    ShardEntry,
    TableFile,
    archive_from_json,
    shard_from_json,
)
from dataservice.storage.objects import Store
from dataservice.storage.recordfiles import RecordScan, packing_of
from dataservice.storage.sources import SourceFiles
from dataservice.storage.spool import Spool, joined
from dataservice.storage.tables import IMAGES, SAMPLES, write_atomically, write_bytes, write_table
from dataservice.storage.taking import Picker, Taken

Ints = NDArray[np.int64]

SHARD_PREFIX = "shard-"

_BATCH_LINES = 256
_SAMPLE_TYPES = {
    "offset": "u8",
    "length": "u4",
    "crc32": "u4",
    "text_tokens": "u4",
    "loss_tokens": "u4",
    "image_start": "u4",
    "num_images": "u2",
    "layout": "u1",
    "num_docs": "u4",
}
_IMAGE_TYPES = {
    "archive": "u4",
    "member": "u4",
    "width": "u2",
    "height": "u2",
    "text_before": "u4",
    "markup": "u2",
    "probed": "u1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRecord:
    """A record that cannot be used, as it stands in the index's list of them."""

    source: str
    file: str
    line: int
    """From 1."""
    offset: int
    """In bytes of the unpacked content."""
    reason: str

    def as_line(self) -> bytes:
        """JSON and a line feed."""
        text = json.dumps(asdict(self), ensure_ascii=False) + "\n"
        return text.encode(errors="backslashreplace")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    entry: ShardEntry
    """Its `archives` count in the list below."""
    archives: tuple[ArchiveEntry, ...]
    beside: tuple[ArchiveIdentity, ...]
    """Of the archives of its stem."""
    rejected_path: str
    unread: str
    """What of the file is lost and why, for a person; empty where it was read to its end."""
    reused: bool


def shard_key(
    files: SourceFiles,
    file: FoundFile,
    beside: Sequence[FoundFile],
    roots: str,
    taken: Taken | None,
    counter: str,
) -> str:
    """Names the tables of a record file by all that they follow from; `roots` is the `files_key`
    of the source's image roots."""
    parts = [
        INDEX_VERSION,
        counter,
        asdict(files.format),
        [files.name, files.strip_prefix, files.add_prefix],
        taken and asdict(taken),
        [files_key((file, *beside)), roots],
    ]
    return name_by_digest(SHARD_PREFIX, json.dumps(parts))


def load_shard(index_dir: str, key: str, store: Store, *, deadline_s: float) -> ShardResult | None:
    """The tables of an earlier build; None when there are none or a file of a folder changed."""
    try:
        with open(os.path.join(index_dir, key + ".json"), "rb") as file:
            data = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    archives = tuple(map(archive_from_json, data["archives"]))
    entry = shard_from_json(data["entry"])
    tables = [entry.samples, entry.images]
    tables += [table for archive in archives for table in (archive.members, archive.names) if table]
    rejected = TableFile(name=key + ".rejected", size_bytes=data["rejected_bytes"])
    if data["again"] or not all(_is_whole(index_dir, table) for table in (*tables, rejected)):
        return None
    try:
        for archive in archives:
            if archive.kind == "folder" and not same_files(index_dir, archive, store, deadline_s):
                return None
    except StaleIndexError:
        return None
    return ShardResult(
        entry=entry,
        archives=archives,
        beside=tuple(ArchiveIdentity(**identity) for identity in data["beside"]),
        rejected_path=os.path.join(index_dir, rejected.name),
        unread=data["unread"],
        reused=True,
    )


class ShardBuilder:
    """Reads one record file: `for done in read(...)`, then `finish()`; `close()` in any case."""

    def __init__(
        self,
        index_dir: str,
        key: str,
        files: SourceFiles,
        file: FoundFile,
        finder: ImageFinder,
        beside: Sequence[ArchiveIdentity],
    ) -> None:
        self._index_dir = index_dir
        self._key = key
        self._source = files.name
        self._file = file
        self._finder = finder
        self._beside = tuple(beside)
        self._samples = {name: Spool(kind, index_dir) for name, kind in _SAMPLE_TYPES.items()}
        self._images = {name: Spool(kind, index_dir) for name, kind in _IMAGE_TYPES.items()}
        self._by_kind = [Spool("u4", index_dir) for _ in range(3)]
        """Rows without images, with images, and of rejected records."""
        self._used: dict[int, int] = {}
        """Number among the shard's archives, by number in the finder; above its last one are the
        places in the record file."""
        self._inside: dict[int, str] = {}
        self._folders: dict[int, FolderTable] = {}
        self._rejected = tempfile.TemporaryFile(dir=index_dir)
        self._again = False
        self._unread = ""
        self._text_tokens = self._loss_tokens = 0

    @property
    def num_samples(self) -> int:
        return self._samples["offset"].num_values

    @property
    def num_rejected(self) -> int:
        return self._by_kind[2].num_values

    def read(
        self, store: Store, rows: RowReader, taken: Taken | None, *, deadline_s: float
    ) -> Iterator[int]:
        """Takes the records of the file; yields the bytes done. Raises StorageError."""
        scan = RecordScan(store, self._file.url, self._file.stat.size_bytes, deadline_s=deadline_s)
        picker = taken and Picker(taken)
        seen = 0
        wanted: list[Line] = []
        for lines in scan.batches(_BATCH_LINES):
            wanted = lines
            if picker:
                wanted = [lines[row - seen] for row in picker.between(seen, seen + len(lines))]
            seen += len(lines)
            if wanted:
                self._add(rows.read(wanted))
            yield min(lines[-1].offset + lines[-1].length, self._file.stat.size_bytes)
        self._unread = scan.unread if wanted and wanted[-1].problem == scan.unread else ""
        self._crc32 = scan.crc32
        self._unpacked_bytes = scan.unpacked_bytes

    def finish(self, name: str) -> ShardResult:
        """Write the tables; the shard counts from here on."""
        samples = {column: spool.finish() for column, spool in self._samples.items()}
        samples["by_kind"] = joined("u4", self._index_dir, [s.finish() for s in self._by_kind])
        images = {column: spool.finish() for column, spool in self._images.items()}
        archives = tuple(self._archive_entry(number) for number in self._used)
        digest = hashlib.sha256()
        tables = {}
        for what, columns, values in (("samples", SAMPLES, samples), ("images", IMAGES, images)):
            file_name = f"{self._key}.{what}.arrow"
            written = write_table(os.path.join(self._index_dir, file_name), columns, values)
            tables[what] = TableFile(name=file_name, size_bytes=written.size_bytes)
            digest.update(written.digest.encode())
        for archive in archives:
            digest.update(f"{archive.kind}:{archive.directory_crc32}:{archive.column};".encode())
        packing = packing_of(self._file.url)
        entry = ShardEntry(
            name=name,
            url=self._file.url,
            size_bytes=self._file.stat.size_bytes,
            mtime_ns=self._file.stat.mtime_ns,
            packing=packing,
            unpacked_bytes=self._unpacked_bytes if packing in ("gz", "zst", "zip") else 0,
            crc32=self._crc32,
            num_samples=self.num_samples,
            num_text_samples=self._by_kind[0].num_values,
            num_rejected=self.num_rejected,
            num_images=self._images["member"].num_values,
            text_tokens=self._text_tokens,
            loss_tokens=self._loss_tokens,
            digest=digest.hexdigest(),
            samples=tables["samples"],
            images=tables["images"],
            archives=tuple(range(len(archives))),
        )
        return self._write_head(entry, archives)

    def close(self) -> None:
        """Drops what is not finished."""
        self._rejected.close()
        for spool in (*self._samples.values(), *self._images.values(), *self._by_kind):
            spool.close()

    def _write_head(self, entry: ShardEntry, archives: tuple[ArchiveEntry, ...]) -> ShardResult:
        rejected_path = os.path.join(self._index_dir, self._key + ".rejected")
        self._rejected.seek(0)
        rejected_bytes = write_atomically(
            rejected_path, lambda file: shutil.copyfileobj(self._rejected, file)
        )
        head = {
            "entry": asdict(entry),
            "archives": [asdict(archive) for archive in archives],
            "beside": [asdict(identity) for identity in self._beside],
            "again": self._again,
            "rejected_bytes": rejected_bytes,
            "unread": self._unread,
        }
        data = json.dumps(head).encode()
        write_bytes(os.path.join(self._index_dir, self._key + ".json"), data)
        return ShardResult(
            entry=entry,
            archives=archives,
            beside=self._beside,
            rejected_path=rejected_path,
            unread=self._unread,
            reused=False,
        )

    def _add(self, rows: Rows) -> None:
        first = self.num_samples
        counts = rows.samples["num_images"]
        starts = np.cumsum(counts) - counts + self._images["member"].num_values
        for name, spool in self._samples.items():
            spool.add(starts if name == "image_start" else rows.samples[name])
        bad = np.zeros(rows.num_rows, dtype=bool)
        bad[[rejected.row for rejected in rows.rejected]] = True
        for spool, chosen in zip(
            self._by_kind, (~bad & (counts == 0), counts > 0, bad), strict=True
        ):
            spool.add(np.flatnonzero(chosen) + first)
        self._text_tokens += int(rows.samples["text_tokens"].sum())
        self._loss_tokens += int(rows.samples["loss_tokens"].sum())
        self._again |= rows.again
        self._add_images(rows)
        for rejected in rows.rejected:
            record = RejectedRecord(
                source=self._source,
                file=self._file.url,
                line=rejected.line,
                offset=rejected.offset,
                reason=rejected.reason,
            )
            self._rejected.write(record.as_line())

    def _add_images(self, rows: Rows) -> None:
        archive, member = rows.images["archive"].copy(), rows.images["member"].copy()
        if rows.files:
            self._move_to_tables(rows.files, archive, member)
        outside = len(self._finder.archives)
        for number in np.unique(archive).tolist():
            key = number
            if number >= outside:
                column = rows.inside[number - outside]
                key = self._key_inside(column)
            used = self._used.setdefault(key, len(self._used))
            archive[rows.images["archive"] == number] = used
        for name, spool in self._images.items():
            spool.add({"archive": archive, "member": member}.get(name, rows.images[name]))

    def _key_inside(self, column: str) -> int:
        for key, known in self._inside.items():
            if known == column:
                return key
        key = len(self._finder.archives) + len(self._inside)
        self._inside[key] = column
        return key

    def _move_to_tables(self, files: Sequence[FolderFile], archive: Ints, member: Ints) -> None:
        """From numbers in `files` to rows of the shard's folder tables, in place."""
        for number in {file.archive for file in files}:
            folder = self._finder.archives[number]
            assert isinstance(folder, Folder)
            if number not in self._folders:
                self._folders[number] = FolderTable(folder.url, self._index_dir)
            own = [place for place, file in enumerate(files) if file.archive == number]
            table_rows = np.zeros(len(files), dtype=np.int64)
            table_rows[own] = self._folders[number].add([files[place] for place in own])
            inside = archive == number
            member[inside] = table_rows[member[inside]]

    def _archive_entry(self, key: int) -> ArchiveEntry:
        if key in self._inside:
            column = self._inside[key]
            return ArchiveEntry(
                kind="parquet" if column else "inline",
                url=self._file.url,
                size_bytes=self._file.stat.size_bytes,
                mtime_ns=self._file.stat.mtime_ns,
                num_members=0,
                directory_crc32=0,
                members=None,
                names=None,
                column=column,
            )
        archive = self._finder.archives[key]
        if isinstance(archive, Folder):
            return self._folders[key].write(f"{self._key}.folder{self._used[key]}")
        return archive.entry


def _is_whole(index_dir: str, table: TableFile) -> bool:
    path = os.path.join(index_dir, table.name)
    return os.path.exists(path) and os.path.getsize(path) == table.size_bytes
