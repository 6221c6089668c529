from __future__ import annotations

import base64
import io
import json
import random
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.archives import Source, directory, place
from support.forked_reads import image_spec, make_images, read_after_fork, shard_of
from support.zipbuilder import BZIP2, DEFLATE64, DEFLATED, LZMA, STORED, ZSTD, Part, build

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, ImageError
from dataservice.storage.members import IN_PARQUET, IN_RECORD, probe_place, read_image
from dataservice.storage.membertable import AS_IT_IS, MAX_MEMBER_BYTES
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import RecordFormat
from dataservice.storage.zips import Place

METHODS = [STORED, DEFLATED, DEFLATE64, BZIP2, LZMA, ZSTD]


def picture(file_format: str, width: int = 64, height: int = 48, **options: object) -> bytes:
    pixels = random.Random(1).randbytes(width * height * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, file_format, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def spec(method: int, offset: int, size: int, **changed: object) -> ImageSpec:
    fields: dict[str, object] = {
        "shard": 0, "member": "a.png", "offset": offset, "stored_bytes": size, "size_bytes": size,
        "method": method, "crc32": -1, "width": 1, "height": 1, "target_width": 1,
        "target_height": 1,
    }  # fmt: skip
    return ImageSpec(**{**fields, **changed})  # type: ignore[arg-type]


def in_memory(data: bytes, name: str = "x.zip") -> tuple[ShardRef, Source]:
    return (
        ShardRef(source="s", name=name, url=name, size_bytes=len(data), mtime_ns=0),
        Source(data),
    )


def fetch(data: bytes, image: ImageSpec, fmt: RecordFormat | None = None) -> bytes:
    shard, source = in_memory(data)
    return read_image(lambda _, offset, size: source(offset, size), image, shard, fmt)


@pytest.mark.parametrize("method", METHODS)
def test_zip_members(method: int) -> None:
    data = build([Part(name=b"a.png", data=b"before"), Part(data=b"words " * 99, method=method)])
    assert fetch(data, image_spec(directory(data), 1)) == b"words " * 99


def test_plain_files_and_tar_members() -> None:
    assert fetch(b"12345", spec(AS_IT_IS, 0, 5)) == b"12345"
    assert fetch(b"12345", spec(AS_IT_IS, 1, 3)) == b"234"


def test_images_in_records() -> None:
    data = picture("PNG")
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    record = {"image": ["a.jpg", uri], "text": "<image> and <image>"}
    line = json.dumps(record).encode()
    file = b"\n\n" + line + b"\n"
    fmt = RecordFormat(data_uris=True)
    image = spec(IN_RECORD, 2, len(line), member="1")
    assert fetch(file, image, fmt) == data
    assert fetch(file, replace(image, crc32=zlib.crc32(data)), fmt) == data
    with pytest.raises(ArchiveError, match=r"shard x.zip, member 1: CRC mismatch"):
        fetch(file, replace(image, crc32=1), fmt)
    with pytest.raises(ArchiveError, match="does not stand in it"):
        fetch(file, replace(image, member="0"), fmt)


def test_images_in_parquet_rows(tmp_path: Path) -> None:
    rows = [{"bytes": picture("PNG"), "path": "a.png"}, {"bytes": picture("JPEG"), "path": None}]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"images": [rows, rows[:1]], "text": ["a", "b"]}), path)
    shard = replace(shard_of(path), packing="parquet")
    with ShardReader(None) as reader:
        image = spec(IN_PARQUET, 0, 0, member="images/1")
        assert read_image(reader.read, image, shard) == rows[1]["bytes"]
        with pytest.raises(ArchiveError, match="member images/5"):
            read_image(reader.read, replace(image, member="images/5"), shard)


def test_errors_name_source_shard_and_member() -> None:
    data = bytearray(build([Part(name=b"images/a.png", data=bytes(500))]))
    data[100] = 1
    image = image_spec(directory(bytes(data)), 0)
    with pytest.raises(ArchiveError, match=r"source s, shard x.zip, member images/a.png: CRC"):
        fetch(bytes(data), image)
    with pytest.raises(ArchiveError, match="unsupported compression method -9"):
        fetch(bytes(data), replace(image, method=-9))


def test_nothing_large_is_read() -> None:
    shard, source = in_memory(build([Part(data=b"x")]))
    for method in (AS_IT_IS, STORED, DEFLATED):
        image = spec(method, 0, MAX_MEMBER_BYTES + 1)
        with pytest.raises(ArchiveError, match="over the size limit"):
            read_image(lambda _, at, size: source(at, size), image, shard)
    with pytest.raises(ArchiveError, match="over the size limit"):
        probe_place(source, Place(STORED, 0, 5, MAX_MEMBER_BYTES + 1, 0), shard.size_bytes)
    assert source.reads == []


# ---- headers


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("method", [AS_IT_IS, *METHODS])
def test_headers_of_members(method: int, file_format: str) -> None:
    options = {"exif": turned(6)} if file_format in ("JPEG", "PNG", "WEBP") else {}
    data = picture(file_format, **options)
    if method == AS_IT_IS:
        archive, where = b"tar header" + data, Place(AS_IT_IS, 10, len(data), len(data), 0)
    else:
        archive = build([Part(data=data, method=method)])
        where = place(directory(archive), 0)
    header = probe_place(Source(archive), where, len(archive))
    assert header.format == file_format
    assert (header.width, header.height) == ((48, 64) if options else (64, 48))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("method", [STORED, DEFLATED])
def test_at_most_8_kib_are_read_of_most(file_format: str, method: int) -> None:
    data = picture(file_format, 500, 400)
    assert len(data) > 50_000
    archive = build([Part(name=b"images/0001/some name.jpg", data=data, method=method)])
    source = Source(archive)
    header = probe_place(source, place(directory(archive), 0), len(archive))
    assert (header.width, header.height) == (500, 400)
    assert source.read_bytes <= 8192


@pytest.mark.parametrize("method", [STORED, *METHODS[1:]])
def test_a_header_that_goes_on_far(method: int) -> None:
    profile = random.Random(2).randbytes(200_000)
    for file_format in ("JPEG", "PNG"):
        data = picture(file_format, 200, 150, icc_profile=profile, exif=turned(8))
        archive = build([Part(data=data, method=method)])
        header = probe_place(Source(archive), place(directory(archive), 0), len(archive))
        assert (header.width, header.height) == (150, 200)


def test_headers_that_cannot_be_had() -> None:
    text = Part(name=b"t", data=b"<html>", method=DEFLATED)
    cut = Part(name=b"c", data=picture("JPEG")[:30], method=DEFLATED)
    wrong = Part(name=b"w", data=b"x" * 90, method=DEFLATED, stored=b"\xff" * 90)
    lies = Part(name=b"l", data=picture("JPEG")[:30], method=DEFLATED, size=50_000)
    empty = Part(name=b"e", data=b"", method=DEFLATED)
    archive = build([text, cut, wrong, lies, empty])
    table = directory(archive)
    for row, (kind, reason) in enumerate(
        [
            (ImageError, "not an image"),
            (ImageError, "truncated"),
            (ArchiveError, "cannot be inflated"),
            (ImageError, "truncated"),
            (ImageError, "empty"),
        ]
    ):
        with pytest.raises(kind, match=reason):
            probe_place(Source(archive), place(table, row), len(archive))


def test_a_far_header_of_a_compressed_member_is_not_unpacked_again_and_again() -> None:
    """A JPEG of 4 MiB in tiny segments: what is read in all stays in proportion."""
    segments = b"\xff\xe0" + (1000).to_bytes(2, "big") + random.Random(3).randbytes(998)
    data = b"\xff\xd8" + segments * 4000 + b"\xff\xd9"
    archive = build([Part(data=data, method=DEFLATED, stored=None)])
    source = Source(archive)
    with pytest.raises(ImageError, match="no picture"):
        probe_place(source, place(directory(archive), 0), len(archive))
    assert source.read_bytes < 20 * len(archive)


# ---- many at once


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_with_threads_read_the_right_bytes(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    with ShardReader(None, deadline_s=30) as reader:
        counts = read_after_fork(reader, images, processes=4, threads=8, seconds=0.5)
    assert len(counts) == 4 and min(counts) > 0


def test_what_zipfile_says_of_the_made_images(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    with zipfile.ZipFile(tmp_path / "0.zip") as archive:
        known = {info.filename: info.CRC for info in archive.infolist()}
    for image in images[:60]:
        assert known[image.spec.member] == image.crc32
