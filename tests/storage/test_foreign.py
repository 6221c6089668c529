"""Files that are none of records, or that cannot be read to their end: what people are told."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from storage.datasets import ByteCounter, picture, write_jsonl, write_zip
from storage.recordbytes import MemoryStore, pack

from dataservice.linting.run import Options, lint_files
from dataservice.storage.index_build import build_index
from dataservice.storage.index_report import IndexReport
from dataservice.storage.lazy import CountingHere, LazyIndex, scan_sources
from dataservice.storage.recordfiles import RecordScan, scan_offsets
from dataservice.storage.recordfiles.foreign import HEAD_BYTES, why_no_records
from dataservice.storage.sources import SourceFiles

LINES = b"".join(b'{"text": "number %d %d"}\n' % (i, i * i * 7919) for i in range(3000))


def tar() -> bytes:
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w") as archive:
        for name, data in {"0.jpg": picture(20, 30, "JPEG"), "0.json": b"{}"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stored.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stored.getvalue()


def parquet() -> bytes:
    stored = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b"]}), stored)
    return stored.getvalue()


FOREIGN = {
    "shard.tar": (tar(), "'shard.tar' is a tar archive, .*WebDataset.*and the tar in `images`"),
    "shard.tar.gz": (gzip.compress(tar()), "is a tar archive, .*unpack it to .tar; of a WebData"),
    "shard.tgz": (gzip.compress(tar()), "is gzip data, .*a compressed tar is unpacked to .tar"),
    "named.jsonl": (tar(), "'named.jsonl' is a tar archive, not a record file: records are .jsonl"),
    "packed.jsonl": (gzip.compress(LINES), "is gzip data, .*named .jsonl.gz"),
    "table.json": (parquet(), "is a Parquet file, .*name it .parquet"),
    "pictures.jsonl": (zipped(("a.jpg", b"x")), "is a zip archive, .*into `images` of the source"),
    "pictures.zip": (zipped(("a.jpg", b"x")), "holds no record file .*`images` of the source"),
    "cat.jpg": (picture(9, 9, "JPEG"), "is a JPEG picture, .*images goes into `images`"),
    "cat.parquet": (picture(9, 9, "PNG"), "'cat.parquet' is a PNG picture, not a record file"),
    "paper.pdf": (b"%PDF-1.7\n1 0 obj\n", "is a file of the format PDF, not a record file"),
    "page.jsonl": (b"<!DOCTYPE html>\n<p>Not found\n", "is an HTML page, not a record file"),
    "labels.csv": (b"image,caption\n" + b"a.jpg,a cat\n" * 50, "is a text that is not JSON, not"),
    "weights.bin": (bytes(range(256)) * 400, r"is no text \(first bytes: 00 01 02 03"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_record_file_is_one_record_that_says_so(tmp_path: Path, name: str) -> None:
    data, reason = FOREIGN[name]
    (tmp_path / name).write_bytes(data)
    (said,) = full_and_lazy(tmp_path, name)
    assert re.search(reason, said), said


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("part-00000", b'{"text": "a"}\n'),
        ("part-00000", b'broken\n{"text": "a"}\n'),
        ("notes.txt", b'\xef\xbb\xbf[{"text": "a"}]\n'),
        ("empty.txt", b""),
        ("blank.txt", b"\n\n"),
        ("a.jsonl", b"broken\n"),
        ("a.jsonl.gz", b"broken\n"),
        ("s3://bucket/a.jsonl?version=1.2", b"broken\n"),
        ("cut.txt", b"\n{" + "\u20ac".encode() * HEAD_BYTES),
    ],
)
def test_what_may_hold_records_is_read(name: str, head: bytes) -> None:
    assert why_no_records(name, head[:HEAD_BYTES]) == ""


def test_a_text_is_told_whatever_character_its_head_ends_in() -> None:
    for start in range(3):
        head = (b"x" * start + "\u20ac".encode() * HEAD_BYTES)[:HEAD_BYTES]
        assert "is a text that is not JSON" in why_no_records("a.txt", head)


# ---- what is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_what_is_lost_behind_damage_is_said(
    tmp_path: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = pack(packing, LINES, parts=5)
    (tmp_path / f"a.jsonl.{packing}").write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        said = full_and_lazy(tmp_path, f"a.jsonl.{packing}")[-1]
    lines = rows(f"a.jsonl.{packing}", whole[: len(whole) // 2])
    number, offset = lines[-1]
    assert 10 < number < 3000
    assert said.endswith(
        f"; everything from byte {offset} of the unpacked content on, record {number} and all "
        "behind it, is lost and could not be counted"
    )
    report = index(tmp_path, f"a.jsonl.{packing}")
    assert report.unread == (f"{tmp_path}/a.jsonl.{packing}: {said}",)
    assert "1 record file(s) not read to the end; all that" in caplog.text


def test_nothing_is_lost_of_a_good_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, b"broken")
    report = index(tmp_path, "a.jsonl")
    assert (report.num_rejected, report.unread) == (1, ())
    assert not caplog.records


def test_damage_behind_what_is_taken_is_no_loss(tmp_path: Path) -> None:
    whole = gzip.compress(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    report = index(tmp_path, "a.jsonl.gz", take="first:10")
    assert (report.num_samples, report.num_rejected, report.unread) == (10, 0, ())


def test_a_damaged_row_group_loses_the_rows_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 50] * 1000}), path, row_group_size=100)
    data = bytearray(path.read_bytes())
    data[600:700] = bytes(100)
    path.write_bytes(data)
    said = full_and_lazy(tmp_path, "a.parquet")[-1]
    assert said.endswith(
        "; this row of the file and all behind it are lost and could not be counted"
    )


def test_of_a_zip_the_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    one = b'{"text": "one"}'  # without a line end
    members = [("a.jsonl", one), ("notes.txt", b""), *((f"{n}.json", b"{}") for n in range(5))]
    (tmp_path / "a.jsonl.zip").write_bytes(zipped(*members))
    (said,) = full_and_lazy(tmp_path, "a.jsonl.zip")
    assert said.startswith(
        "the zip holds more than one record file, and only a.jsonl is read, not 0.json, 1.json, "
        "2.json and 2 more; unpack it"
    )
    assert index(tmp_path, "a.jsonl.zip").num_samples == 2
    for name, content in (("a.jsonl", one + b"\n\n{}\n"), ("a.json", b"[{},{}]")):
        lines = rows(f"{name}.zip", zipped((name, content), ("b.json", b"{}")))
        assert len(lines) == 3
        assert lines[-1] == (4 if name == "a.jsonl" else 3, len(content))


# ---- JSON over many lines -----------------------------------------------------------------------


@pytest.mark.parametrize("records", [[{"text": "a"}, {"text": "b"}], {"text": "a"}])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_one_json_value_over_many_lines_is_told_once(
    tmp_path: Path, records: object, mark: bytes
) -> None:
    what = "array" if isinstance(records, list) else "object"
    (tmp_path / "a.jsonl").write_bytes(mark + json.dumps(records, indent=2).encode())
    first, *others = full_and_lazy(tmp_path, "a.jsonl")
    assert f"one JSON {what} over many lines" in first and first.endswith("name it .json")
    assert others and not any("many lines" in reason for reason in others)


# ---- images that are called by a key ------------------------------------------------------------


def test_the_image_of_a_key_may_be_png_or_webp(tmp_path: Path) -> None:
    keys = [{"caption": "A cat.", "key": key, "status": "success"} for key in "0123"]
    write_jsonl(tmp_path / "a.jsonl", *keys, {"caption": "A cat.", "image": "1.jpg"})
    images = {"0.jpg": 10, "0.png": 20, "1.png": 30, "2.webp": 40, "2.gif": 50}
    write_zip(
        tmp_path / "a.zip",
        {n: picture(w, 10, "JPEG" if "jpg" in n else "PNG") for n, w in images.items()},
    )
    said = full_and_lazy(tmp_path, "a.jsonl", num_images=3)
    assert "no such image: '3.jpg'" in said[0] and said[0].endswith("there as .png or .webp")
    assert "no such image: '1.jpg'" in said[1] and ".png" not in said[1]
    assert len(said) == 2


# ---- ways to read a file ------------------------------------------------------------------------


def source(folder: Path, name: str, **changes: str) -> SourceFiles:
    return SourceFiles(name="s", records=(f"{folder}/{name}",), **changes)


def index(folder: Path, name: str, **changes: str) -> IndexReport:
    of = source(folder, name, **changes)
    return build_index([of], f"{folder}/index", counter=ByteCounter)


def full_and_lazy(folder: Path, name: str, num_images: int | None = None) -> list[str]:
    """Why records are rejected: the same in the index, a lazy one and in `lint`."""
    report = index(folder, name)
    if num_images is not None:
        assert sum(of.num_images for of in report.sources) == num_images
    text = Path(report.rejected_path).read_text()
    full = [json.loads(line)["reason"] for line in text.splitlines()]
    of, counter = source(folder, name), ByteCounter()
    scan_sources([of], f"{folder}/lazy", counter=counter.fingerprint)
    lazy = LazyIndex.open(f"{folder}/lazy")
    here = CountingHere(lazy, [of], counter)
    try:
        keys = [(0, block) for block in range(-(-report.num_samples // 64))]
        here.count_all(keys)
        assert [rejected.reason for _, _, rejected in lazy.rejected()] == full
    finally:
        here.close()
        lazy.close()
    if name.endswith((".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".jsonl.zip", ".parquet")):
        findings = lint_files([f"{folder}/{name}"], [], Options())
        more = [finding.reason for finding in findings if finding.reason]
        searched = re.compile("places searched: [0-9]+")  # of a file by itself also its folder
        assert [searched.sub("", x) for x in more] == [searched.sub("", x) for x in full]
    return full


def rows(name: str, data: bytes) -> list[tuple[int, int]]:
    """Number and offset of the records, of which the offsets are found likewise."""
    store = MemoryStore({name: data})
    made = RecordScan(store, name, len(data), deadline_s=9)
    found = [(line.number, line.offset) for batch in made.batches() for line in batch]
    offsets = scan_offsets(store, name, len(data), deadline_s=9)
    assert offsets.offset.tolist() == [offset for _, offset in found]
    assert offsets.unread == made.unread
    return found
