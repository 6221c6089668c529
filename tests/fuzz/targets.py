"""What is fuzzed: each target takes any bytes and fails on anything but a refusal of ours.

A target raises nothing for input that is refused as documented, and AssertionError when two ways
to read the same bytes disagree. `SEEDS` are inputs to start from.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import msgpack
import numpy as np

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, RecordError, StorageError, WireError
from dataservice.storage.backends import ObjectStat
from dataservice.storage.journal import Journal, JournalDamaged
from dataservice.storage.members import read_image
from dataservice.storage.recordfiles import RecordScan, scan_offsets
from dataservice.storage.recordfiles.foreign import HEAD_BYTES, why_no_records
from dataservice.storage.records import LAYOUTS, RecordReader, parse_record
from dataservice.storage.sources import RecordFormat
from dataservice.storage.zips import read_directory
from dataservice.wire.codec import EncodedPack, PackDecoder, encode_pack
from dataservice.wire.segment import read_pack

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_FORMATS = (
    RecordFormat(data_uris=True),
    RecordFormat(mismatch="front", placeholders=("<image>", "<image_{n}>", "<img>")),
    *(RecordFormat(layout=layout) for layout in LAYOUTS),
)


class _Bytes:
    """An ObjectStore of one object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stat(self, url: str, *, deadline_s: float) -> ObjectStat:
        return ObjectStat(size_bytes=len(self._data), mtime_ns=1)

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        return self._data[offset : offset + size]

    def glob(self, pattern: str, *, deadline_s: float) -> dict[str, ObjectStat | None]:
        return {pattern: None}

    def list_folder(self, folder: str, prefix: str, *, deadline_s: float) -> None: ...


def zips(data: bytes) -> None:
    """Every member that can be read has the size and CRC that the directory promises."""
    try:
        table = read_directory(lambda at, size: _exactly(data, at, size), len(data))
    except ArchiveError:
        return
    shard = ShardRef(source="s", name="a.zip", url="a.zip", size_bytes=len(data), mtime_ns=1)
    for row in range(min(len(table.name), 50)):
        if table.problem[row]:
            continue
        image = ImageSpec(
            shard=0,
            member=str(table.name[row]),
            offset=int(table.offset[row]),
            stored_bytes=int(table.stored_bytes[row]),
            size_bytes=int(table.size_bytes[row]),
            method=int(table.method[row]),
            crc32=int(table.crc32[row]),
            width=1,
            height=1,
            target_width=28,
            target_height=28,
        )
        try:
            found = read_image(lambda _, at, size: _exactly(data, at, size), image, shard)
        except ArchiveError:
            continue
        assert len(found) == image.size_bytes
        assert zlib.crc32(found) == image.crc32


def jsonl(data: bytes) -> None:
    """The first byte chooses the container; scanning and offsets alone give the same rows."""
    name = ("a.jsonl", "a.json", "a.jsonl.gz", "a.json.zst", "a.jsonl.zip")[
        data[0] % 5 if data else 0
    ]
    content = data[1:]
    store = _Bytes(content)
    try:
        scan = RecordScan(store, name, len(content), deadline_s=10.0, max_record_bytes=1 << 16)
        rows = [(x.offset, x.length) for batch in scan.batches() for x in batch]
    except (StorageError, RecordError, ArchiveError):
        rows = None
    try:
        found = scan_offsets(store, name, len(content), deadline_s=10.0)
        offsets = list(zip(found.offset.tolist(), found.length.tolist(), strict=True))
    except (StorageError, RecordError, ArchiveError):
        offsets = None
    assert rows == offsets
    if name == "a.jsonl" and rows is not None:
        lines = [x.removesuffix(b"\r") for x in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
        if why_no_records(name, content[:HEAD_BYTES]):
            assert rows == [(0, 0)]
            return
        assert [content[at : at + size] for at, size in rows] == [x for x in lines if x.strip()]


def records(data: bytes) -> None:
    """The compiled and the exact reader agree; nothing but RecordError is raised."""
    fmt = _FORMATS[data[0] % len(_FORMATS)] if data else _FORMATS[0]
    line = data[1:]
    try:
        exact = parse_record(line, fmt)
    except RecordError as error:
        exact = str(error)
    try:
        fast = RecordReader(fmt).read(line)
    except RecordError as error:
        fast = str(error)
    assert fast == exact


def codec(data: bytes) -> None:
    """The first byte chooses between frames as they are and a header with the right checksum."""
    frames: Iterator[bytes]
    if data and data[0] % 2:
        split = 1 + int.from_bytes(data[1:3], "little") % max(len(data), 1)
        body, payload = data[3:split], data[split:]
        seed = zlib.crc32(body)
        first = struct.pack("<4sIII", b"VDPK", 2, len(body), seed) + body
        crc = zlib.crc32(payload, zlib.crc32((1).to_bytes(4, "little"), seed))
        frames = iter([first, struct.pack("<II", 1, crc) + payload])
    else:
        size = 1 + int.from_bytes(data[1:3], "little")
        frames = iter([data[at : at + size] for at in range(3, len(data), size)])
    decoder = PackDecoder(max_bytes=1 << 20)
    try:
        for frame in frames:
            decoder.feed(frame)
        arrays, _ = decoder.result()
    except WireError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= 1 << 20


def segment(data: bytes) -> None:
    """The first byte chooses between bytes as they are and a header with the right checksum."""
    content = data[1:]
    if data and data[0] % 2:
        split = 2 + int.from_bytes(data[1:3], "little") % max(len(data), 1)
        body = data[3:split]
        first = struct.pack("<4sIII", b"VDPK", 2, len(body), zlib.crc32(body)) + body
        content = first + bytes(-len(first) % 64) + data[split:]
    try:
        arrays, _ = read_pack(np.frombuffer(content, np.uint8), max_bytes=1 << 20)
    except WireError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= 1 << 20


def journal(data: bytes) -> None:
    """A file that opens takes another record and gives back all it gave before."""
    path = _FOLDER / "journal"
    content = data[1:]
    if data and data[0] % 2:  # a good mark and checksum around any payload
        checksum = zlib.crc32(content, zlib.crc32(struct.pack("<I", len(content))))
        head = struct.pack("<4sII", b"\x9eJR\n", len(content), checksum)
        content = b"vlm-dataservice journal 1\n" + head + content
    path.write_bytes(content)
    try:
        opened, before = Journal.open(str(path))
    except (JournalDamaged, StorageError):
        assert path.read_bytes() == content
        return
    with opened:
        opened.append({"next": 1})
    opened, after = Journal.open(str(path))
    opened.close()
    assert after == [*before, {"next": 1}]


def _exactly(data: bytes, at: int, size: int) -> bytes:
    if at < 0 or size < 0 or at + size > len(data):
        raise ArchiveError(f"read of {size} bytes at {at} is outside the archive")
    return data[at : at + size]


def _zip(method: int) -> bytes:
    out = BytesIO()
    with ZipFile(out, "w", method) as archive:
        archive.writestr("a/b.png", bytes(range(256)) * 4)
        archive.writestr("c.jpg", b"\xff\xd8\xff" + bytes(100))
    return out.getvalue()


def _journal() -> bytes:
    path = _FOLDER / "seed"
    path.unlink(missing_ok=True)
    opened, _ = Journal.open(str(path))
    with opened:
        opened.append({"kind": "hole", "key": "s/a.jsonl@12#0"})
        opened.append({"kind": "done", "step": 4})
    return path.read_bytes()


def _segment() -> bytes:
    pack = EncodedPack({"a": np.arange(400, dtype=np.int32), "b": np.zeros(9, np.uint8)}, {"k": 1})
    place = np.zeros(pack.segment_bytes, np.uint8)
    pack.write_into(place)
    return place.tobytes()


_TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bus."}]
_RECORDS: list[object] = [
    {"id": "7", "image": "coco/1.jpg", "conversations": _TURNS},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
    {"texts": [None, "A dog."], "images": ["u1.jpg", None], "metadata": "[null, null]"},
    {"text_list": ["A."], "image_info": [{"image_name": "b.jpg", "matched_text_index": 0}]},
    {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A cat."}]},
    {"image": "a.jpg", "caption": "a bird"},
    {"text": "plain"},
    [{"text": "one"}, {"text": "two"}],
]
_LINES = [json.dumps(record).encode() for record in _RECORDS]

TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (zips, jsonl, records, codec, segment, journal)
}
SEEDS: dict[str, list[bytes]] = {
    "zips": [_zip(ZIP_STORED), _zip(ZIP_DEFLATED)],
    "jsonl": [
        b"\0" + b"\n".join(_LINES),
        b"\1[" + b",\n".join(_LINES) + b"]",
        b"\1" + b"\n".join(_LINES),
    ],
    "records": [bytes([k]) + line for k in range(len(_FORMATS)) for line in _LINES],
    "codec": [
        b"\0\xff\xff" + b"".join(encode_pack({"a": np.arange(4, dtype=np.int32)}, {"k": 1})),
        b"\1\x20\0" + msgpack.packb({"arrays": [], "frames": 0, "meta": b"\x80"}),
    ],
    "segment": [b"\0" + _segment()],
    "journal": [b"\0" + _journal(), b"\1" + msgpack.packb({"kind": "hole"})],
}
