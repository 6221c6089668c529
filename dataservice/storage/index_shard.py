"""The tables of one JSONL file: read line by line, checked, counted, its images looked up.

Invariants: rows are in the order of their offsets; what is written follows from the inputs named in
`shard_key` alone, except images of folders, whose files are compared again by `load_shard`; the
JSON file that makes a shard's tables count is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from dataservice.errors import DataError, RecordError, StorageError
from dataservice.storage.archives import Folder, FoundImage, ImageFinder, MissingImage
from dataservice.storage.counting import RecordCounter
from dataservice.storage.jsonl import MAX_LINE_BYTES, Line, scan_lines
from dataservice.storage.listing import FoundFile
from dataservice.storage.manifest import (
    INDEX_VERSION,
    ArchiveEntry,
    ShardEntry,
    TableFile,
    shard_from_json,
)
from dataservice.storage.objects import ObjectStore, read_chunks
from dataservice.storage.records import LAYOUTS, Record, parse_record
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import (
    IMAGES,
    MEMBERS,
    SAMPLES,
    Table,
    digest_arrays,
    to_arrays,
    write_atomically,
    write_table,
)
from dataservice.storage.zips import PLAIN_FILE

_CHUNK_BYTES = 4 * 1024 * 1024
_BATCH_LINES = 256
_SAMPLE_TYPES = {
    "offset": "Q",
    "length": "I",
    "crc32": "I",
    "text_tokens": "I",
    "loss_tokens": "I",
    "image_start": "I",
    "num_images": "H",
    "layout": "B",
}
_IMAGE_TYPES = {
    "archive": "I",
    "member": "I",
    "width": "I",
    "height": "I",
    "text_before": "I",
    "markup": "B",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A record that is not in the index."""

    source: str
    file: str
    line: int
    """From 1."""
    offset: int
    """In bytes."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    entry: ShardEntry
    """Its `archives` count in the list below."""
    archives: tuple[ArchiveEntry, ...]
    rejected_path: str
    reused: bool


def shard_key(files: SourceFiles, file: FoundFile, roots: Sequence[FoundFile], counter: str) -> str:
    """Names the tables of a JSONL file by all that they follow from."""
    parts = [
        INDEX_VERSION,
        counter,
        files.layout,
        files.placeholder,
        files.name,
        [[f.url, f.stat.size_bytes, f.stat.mtime_ns] for f in (file, *roots)],
    ]
    return "shard-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def load_shard(
    index_dir: str, key: str, store: ObjectStore, *, deadline_s: float
) -> ShardResult | None:
    """The tables of an earlier build; None when there are none or a file of a folder changed."""
    try:
        with open(os.path.join(index_dir, key + ".json"), "rb") as file:
            data = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    archives = tuple(
        ArchiveEntry(**{**entry, "members": TableFile(**entry["members"])})
        for entry in data["archives"]
    )
    entry = shard_from_json(data["entry"])
    tables = [entry.samples, entry.images, *(archive.members for archive in archives)]
    rejected_path = os.path.join(index_dir, key + ".rejected")
    if data["again"] or not os.path.exists(rejected_path):
        return None
    if not all(_is_whole(index_dir, table) for table in tables):
        return None
    for archive in archives:
        if archive.kind == "folder" and not _same_files(index_dir, archive, store, deadline_s):
            return None
    return ShardResult(entry=entry, archives=archives, rejected_path=rejected_path, reused=True)


class ShardBuilder:
    """Reads one JSONL file: `for done in read(lines(...), pool)`, then `finish()`."""

    def __init__(
        self,
        index_dir: str,
        key: str,
        files: SourceFiles,
        file: FoundFile,
        name: str,
        counter: RecordCounter,
        finder: ImageFinder,
    ) -> None:
        self._index_dir = index_dir
        self._key = key
        self._files = files
        self._file = file
        self._name = name
        self._counter = counter
        self._finder = finder
        self._samples = {column: array(code) for column, code in _SAMPLE_TYPES.items()}
        self._images = {column: array(code) for column, code in _IMAGE_TYPES.items()}
        self._archives: dict[int, int] = {}
        self._opened: list[Any] = []
        """The archives by number: ZipArchive or Folder."""
        self._folder_files: dict[int, dict[str, tuple[int, FoundImage]]] = {}
        """By archive number and name: row in the folder's table, and the file."""
        self._rejected: list[Rejected] = []
        self._again = False
        self._file_crc = 0

    @property
    def num_samples(self) -> int:
        return len(self._samples["offset"])

    @property
    def num_rejected(self) -> int:
        return len(self._rejected)

    def lines(self, store: ObjectStore, *, deadline_s: float) -> Iterator[Line]:
        """Raises StorageError."""
        chunks = read_chunks(
            store,
            self._file.url,
            size_bytes=self._file.stat.size_bytes,
            chunk_bytes=_CHUNK_BYTES,
            deadline_s=deadline_s,
        )
        return scan_lines(self._sum(chunks))

    def read(self, lines: Iterator[Line], pool: Executor | None) -> Iterator[int]:
        """Take all lines, images of a batch looked up in `pool` at once; yields bytes done."""
        while batch := list(islice(lines, _BATCH_LINES)):
            parsed = [(line, self._parse(line)) for line in batch]
            names = {
                name: None
                for _, record in parsed
                if isinstance(record, Record)
                for name in record.images
            }
            found = dict(zip(names, (pool.map if pool else map)(self._find, names), strict=True))
            for line, record in parsed:
                if isinstance(record, Record):
                    self._add(line, record, found)
                else:
                    self._reject(line, record)
            yield batch[-1].offset + batch[-1].length

    def finish(self) -> ShardResult:
        """Write the tables; the shard counts from here on."""
        has_images = _numpy(self._samples["num_images"]) > 0
        columns = {n: _numpy(c) for n, c in self._samples.items()}
        columns["by_kind"] = np.argsort(has_images, kind="stable").astype(np.uint32)
        samples = to_arrays(SAMPLES, columns)
        images = to_arrays(IMAGES, {n: _numpy(c) for n, c in self._images.items()})
        archives = tuple(self._archive_entry(number) for number in range(len(self._opened)))
        digest = hashlib.sha256()
        for part in (digest_arrays(samples), digest_arrays(images), *(a.digest for a in archives)):
            digest.update(part.encode())
        entry = ShardEntry(
            name=self._name,
            url=self._file.url,
            size_bytes=self._file.stat.size_bytes,
            mtime_ns=self._file.stat.mtime_ns,
            crc32=self._file_crc,
            num_samples=self.num_samples,
            num_text_samples=int((~has_images).sum()),
            num_rejected=self.num_rejected,
            num_images=len(self._images["archive"]),
            text_tokens=int(_numpy(self._samples["text_tokens"]).sum(dtype=np.int64)),
            loss_tokens=int(_numpy(self._samples["loss_tokens"]).sum(dtype=np.int64)),
            digest=digest.hexdigest(),
            samples=self._write("samples", SAMPLES, samples),
            images=self._write("images", IMAGES, images),
            archives=tuple(range(len(archives))),
        )
        rejected_path = os.path.join(self._index_dir, self._key + ".rejected")
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self._rejected]
        _write_text(rejected_path, lines)
        head = {
            "entry": asdict(entry),
            "archives": [asdict(archive) for archive in archives],
            "again": self._again,
        }
        _write_text(os.path.join(self._index_dir, self._key + ".json"), [json.dumps(head)])
        return ShardResult(
            entry=entry, archives=archives, rejected_path=rejected_path, reused=False
        )

    def _sum(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._file_crc = zlib.crc32(chunk, self._file_crc)
            yield chunk

    def _parse(self, line: Line) -> Record | DataError:
        if line.data is None:
            return RecordError(f"a line of {line.length} bytes, over the limit ({MAX_LINE_BYTES})")
        try:
            return parse_record(
                line.data, layout=self._files.layout, placeholder=self._files.placeholder
            )
        except RecordError as error:
            return error

    def _find(self, name: str) -> FoundImage | DataError:
        try:
            return self._finder.find(name)
        except DataError as error:
            return error
        except StorageError as error:
            self._again = True
            return RecordError(f"image {name!r} could not be read: {error}")

    def _add(self, line: Line, record: Record, found: dict[str, FoundImage | DataError]) -> None:
        images = []
        for name in record.images:
            image = found[name]
            if isinstance(image, DataError):
                self._again = self._again or (
                    isinstance(image, MissingImage) and self._finder.has_folders
                )
                self._reject(line, image)
                return
            images.append(image)
        try:
            counted = self._counter.count(record)
        except RecordError as error:
            self._reject(line, error)
            return
        if counted.text_tokens < 1 and not images:
            self._reject(line, RecordError("the record has no text and no image"))
            return
        values = {
            "offset": line.offset,
            "length": line.length,
            "crc32": zlib.crc32(line.data or b""),
            "text_tokens": counted.text_tokens,
            "loss_tokens": counted.loss_tokens,
            "image_start": len(self._images["archive"]),
            "num_images": len(images),
            "layout": LAYOUTS.index(record.layout),
        }
        for column, value in values.items():
            self._samples[column].append(value)
        for image, text_before in zip(images, counted.image_positions, strict=True):
            self._add_image(image, text_before, counted.image_markup)

    def _add_image(self, image: FoundImage, text_before: int, markup: int) -> None:
        number = self._archives.setdefault(id(image.archive), len(self._opened))
        if number == len(self._opened):
            self._opened.append(image.archive)
        member = image.member
        if isinstance(image.archive, Folder):
            files = self._folder_files.setdefault(number, {})
            member, _ = files.setdefault(image.name, (len(files), image))
        for column, value in (
            ("archive", number),
            ("member", member),
            ("width", image.width),
            ("height", image.height),
            ("text_before", text_before),
            ("markup", markup),
        ):
            self._images[column].append(value)

    def _reject(self, line: Line, error: DataError) -> None:
        self._rejected.append(
            Rejected(
                source=self._files.name,
                file=self._file.url,
                line=line.number,
                offset=line.offset,
                reason=str(error),
            )
        )

    def _archive_entry(self, number: int) -> ArchiveEntry:
        archive = self._opened[number]
        if not isinstance(archive, Folder):
            entry: ArchiveEntry = archive.entry
            return entry
        files = self._folder_files[number]
        stats = [image.stat for _, image in files.values() if image.stat]
        size = [stat.size_bytes for stat in stats]
        columns = {
            "offset": [0] * len(files),
            "stored_bytes": size,
            "size_bytes": size,
            "method": [PLAIN_FILE] * len(files),
            "crc32": [0] * len(files),
            "mtime_ns": [stat.mtime_ns for stat in stats],
            "problem": [0] * len(files),
            "name": list(files),
        }
        arrays = to_arrays(MEMBERS, columns)
        lasting = [a for a, name in zip(arrays, MEMBERS.names, strict=True) if name != "mtime_ns"]
        return ArchiveEntry(
            kind="folder",
            url=archive.url,
            size_bytes=0,
            mtime_ns=0,
            num_members=len(files),
            digest=digest_arrays(lasting),
            members=self._write(f"folder{number}", MEMBERS, arrays),
        )

    def _write(self, what: str, schema: Any, arrays: list[Any]) -> TableFile:
        name = f"{self._key}.{what}.arrow"
        size_bytes = write_table(os.path.join(self._index_dir, name), schema, arrays)
        return TableFile(name=name, size_bytes=size_bytes)


def _numpy(column: array[int]) -> Any:
    return (
        np.frombuffer(column, dtype=column.typecode)
        if len(column)
        else np.zeros(0, dtype=column.typecode)
    )


def _write_text(path: str, lines: list[str]) -> None:
    write_atomically(path, lambda file: file.writelines(line.encode() for line in lines))


def _is_whole(index_dir: str, table: TableFile) -> bool:
    path = os.path.join(index_dir, table.name)
    return os.path.exists(path) and os.path.getsize(path) == table.size_bytes


def _same_files(
    index_dir: str, archive: ArchiveEntry, store: ObjectStore, deadline_s: float
) -> bool:
    table = Table(os.path.join(index_dir, archive.members.name), MEMBERS)
    folder = Folder(archive.url, store, deadline_s=deadline_s)
    size, mtime = table.columns["size_bytes"], table.columns["mtime_ns"]
    for row, name in enumerate(table.strings("name").to_pylist()):
        stat = folder.stat(name)
        if stat is None or (stat.size_bytes, stat.mtime_ns) != (size[row], mtime[row]):
            return False
    return True
