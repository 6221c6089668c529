"""Findings of files made here; those of the command line are in tests/cli/test_lint.py."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dataservice.config.schema import WorkersSection
from dataservice.errors import ConfigError, StorageError
from dataservice.linting.archives import lint_archive
from dataservice.linting.findings import Finding
from dataservice.linting.run import Options, lint_files
from dataservice.pipeline.decoding import Decoded
from dataservice.storage.backends import ObjectStat
from dataservice.storage.objects import Store


def picture(width: int = 40, height: int = 30, colour: str = "red", kind: str = "PNG") -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stored, kind)
    return stored.getvalue()


def talk(*images: str, **fields: Any) -> str:
    turns = [
        {"from": "human", "value": "<image>" * len(images) + "What?"},
        {"from": "gpt", "value": "That."},
    ]
    return json.dumps({"image": list(images), "conversations": turns, **fields}) + "\n"


def lint(*files: object, roots: tuple[object, ...] = (), digest: bool = False) -> list[Finding]:
    options = Options(digest=digest)
    return list(lint_files([str(f) for f in files], [str(r) for r in roots], options))


def reasons(findings: list[Finding]) -> list[str | None]:
    return [finding.reason for finding in findings]


# ---- pictures and archives -----------------------------------------------------------------------


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(picture())
    (found,) = lint(path, digest=True)
    assert found.as_object(digest=True) == {
        "file": str(path),
        "kind": "image",
        "outcome": "ok",
        "reason": None,
        "width": 40,
        "height": 30,
        "mean_rgb": (255.0, 0.0, 0.0),
    }
    assert "mean_rgb" not in found.as_object(digest=False)


def test_pictures_keep_their_order_and_large_ones_go_one_by_one(tmp_path: Path) -> None:
    sizes = [(40 + n, 30) for n in range(30)] + [(5000, 4000), (41, 30), (5000, 4001)]
    for number, (width, height) in enumerate(sizes):
        (tmp_path / f"{number:02}.png").write_bytes(picture(width, height))
    found = lint(tmp_path)
    assert [(f.width, f.height) for f in found] == sizes


def test_a_picture_that_takes_too_long_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "b.png").write_bytes(picture())
    release = threading.Event()
    calls = []

    def slow(*_: object) -> Decoded:
        calls.append(1)
        if len(calls) == 1:
            release.wait(20)
        return Decoded(pixels=np.zeros((30, 40, 3), np.uint8), box=(0, 0, 40, 30))

    monkeypatch.setattr("dataservice.linting.pictures.decode_whole", slow)
    options = Options(decode_deadline_s=0.2)
    try:
        found = [f.reason for f in lint_files([str(tmp_path)], [], options)]
    finally:
        release.set()
    assert sorted(map(str, found)) == ["None", "decode took longer than 0.2 s"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    data = picture()
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/a.png", data)
            archive.writestr("../b.png", data)
    else:
        with tarfile.open(path, "w") as tar:
            for name in ("x/a.png", "../b.png"):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    whole, good, bad = (f.as_object(digest=True) for f in lint(path, digest=True))
    assert whole == {
        "file": str(path),
        "kind": kind,
        "member": None,
        "outcome": "ok",
        "reason": None,
        "size": path.stat().st_size,
        "sha256": None,
    }
    assert (good["member"], good["size"]) == ("x/a.png", len(data))
    assert good["sha256"] == hashlib.sha256(data).hexdigest()
    assert bad["outcome"] == "rejected" and "unsafe" in bad["reason"]


# ---- records -------------------------------------------------------------------------------------


def test_a_record_is_good_when_its_pictures_are_whole(tmp_path: Path) -> None:
    whole = picture(kind="JPEG", colour="green")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("good.jpg", whole)
        archive.writestr("cut.jpg", whole[:-40])
    lines = [
        talk("good.jpg"),
        talk("cut.jpg"),
        talk("good.jpg", "good.jpg", "cut.jpg"),
        talk("good.jpg", width=40, height=30),
        talk("good.jpg", width=41, height=30),
        talk("none.jpg"),
        "{\n",
        talk(),
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    found = lint(tmp_path / "a.jsonl")
    assert [f.line for f in found] == list(range(1, 9))
    good, cut, some, sized, wrong, missing, broken, text = reasons(found)
    assert (good, sized, text) == (None, None, None)
    assert cut and cut.startswith("image 'cut.jpg' in photos.zip: truncated JPEG")
    assert some == cut
    assert wrong == (
        "image 'good.jpg' in photos.zip: JPEG is 40x30 pixels upright, the index says 41x30"
    )
    assert missing and missing.startswith("no such image: 'none.jpg'")
    assert broken and broken.startswith("not valid JSON")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_is_looked_for_behind_the_pixels(tmp_path: Path, method: int) -> None:
    noise = Image.frombytes("RGB", (120, 90), random.Random(1).randbytes(120 * 90 * 3))
    stored = io.BytesIO()
    noise.save(stored, "PNG")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("a.png", stored.getvalue())
    (tmp_path / "a.jsonl").write_text(talk("a.png"))
    assert reasons(lint(tmp_path / "a.jsonl")) == [None]


def test_where_images_are_looked_for(tmp_path: Path) -> None:
    """In its own stem's archive, the roots, the files given, its folder's archives, its folder."""
    data = tmp_path / "data"
    places = {
        "own": data / "a.zip",
        "root": tmp_path / "root.zip",
        "given": tmp_path / "given.zip",
        "neighbour": data / "z.zip",
        "folder": data,
        "far": tmp_path / "far",
    }
    for folder in (data, places["far"]):
        folder.mkdir()
    (data / "a.jsonl").write_text("".join(talk(f"{name}.png") for name in places))
    for number, (name, place) in enumerate(places.items()):
        # Each place also has what the places before it have, as pictures that do not decode.
        files = {f"{other}.png": b"bad" for other in list(places)[:number]}
        files[f"{name}.png"] = picture()
        if place.suffix == ".zip":
            with zipfile.ZipFile(place, "w") as archive:
                for member, content in files.items():
                    archive.writestr(member, content)
        else:
            for member, content in files.items():
                (place / member).write_bytes(content)
    found = lint(data / "a.jsonl", tmp_path / "given.zip", roots=(tmp_path / "root.zip",))
    *good, far = reasons([f for f in found if f.kind == "jsonl"])
    assert good == [None] * 5
    assert far and "no such image" in far
    found = lint(data / "a.jsonl", places["given"], roots=(places["root"], places["far"]))
    assert found[5].reason is None


@pytest.mark.parametrize("place", ["given", "root", "neighbour", "own stem"])
def test_an_archive_out_of_reach_hides_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    near = place in ("neighbour", "own stem")
    broken = (tmp_path if near else folder) / ("a.zip" if place == "own stem" else "b.zip")
    broken.write_bytes(b"never read")
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as archive:
        archive.writestr("x.png", picture())
    (tmp_path / "a.jsonl").write_text(talk("x.png") + talk("y.png") + "{\n")
    read = Store.read

    def fails(store: Store, url: str, *given: Any, **more: Any) -> bytes:
        if url == str(broken):
            raise StorageError(f"{url}: permission denied")
        return read(store, url, *given, **more)

    monkeypatch.setattr(Store, "read", fails)
    files = [tmp_path / "a.jsonl", *[broken] * (place == "given")]
    found = lint(*files, roots=(broken,) if place == "root" else ())
    good, missing, bad = reasons([finding for finding in found if finding.line is not None])
    assert good is None
    assert missing and missing.startswith("no such image: 'y.png'")
    assert f"{broken}: could not be read: {broken}: permission denied" in missing
    assert bad and bad.startswith("not valid JSON")
    if place == "given":
        assert [f.reason for f in found if f.file == str(broken)] == [
            f"{broken}: permission denied"
        ]


def test_a_name_that_cannot_be_asked_for_hides_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("{x\n")
    stat = Store.stat

    def fails(store: Store, url: str, *given: Any, **more: Any) -> ObjectStat:
        if url.startswith("s3://"):
            raise StorageError(f"{url}: forbidden")
        return stat(store, url, *given, **more)

    monkeypatch.setattr(Store, "stat", fails)
    root, given, records = lint("s3://b/given.zip", tmp_path / "a.jsonl", roots=("s3://b/r.tar",))
    assert (root.file, root.kind) == ("s3://b/r.tar", "tar")
    assert root.reason == "could not be read: s3://b/r.tar: forbidden"
    assert (given.file, given.kind) == ("s3://b/given.zip", "zip")
    assert records.reason and records.reason.startswith("not valid JSON")


def test_a_packed_record_file_is_no_archive_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(talk("nowhere.png"))
    (tmp_path / "b.jsonl.zip").write_bytes(b"cut off")
    (finding,) = lint(tmp_path / "a.jsonl")
    assert finding.reason == "no such image: 'nowhere.png', places searched: 1"


def test_many_small_members_are_read_together(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(500):
            archive.writestr(f"{number}", bytes([number % 256]) * (number * 37 % 5000))
    reads = []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return (tmp_path / "a.zip").read_bytes()[offset : offset + size]

    size_bytes = (tmp_path / "a.zip").stat().st_size
    found = list(lint_archive("a.zip", "zip", read, size_bytes, digest=True))
    assert reasons(found) == [None] * 501
    assert found[-1].sha256 == hashlib.sha256(bytes([499 % 256]) * (499 * 37 % 5000)).hexdigest()
    assert len(reads) < 60


def test_the_limit_of_pixels_is_that_of_a_run() -> None:
    assert Options().max_pixels == WorkersSection().max_image_pixels


def test_record_files_of_other_kinds(tmp_path: Path) -> None:
    lines = [talk(), "{\n", talk()]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    records = [json.loads(talk()), {"nothing": 1}, json.loads(talk())]
    (tmp_path / "b.json").write_text(json.dumps(records, indent=1))
    with zipfile.ZipFile(tmp_path / "c.jsonl.zip", "w") as archive:
        archive.writestr("c.jsonl", "".join(lines))
    for name in ("a.jsonl.gz", "b.json", "c.jsonl.zip"):
        found = lint(tmp_path / name)
        assert [f.kind for f in found] == ["jsonl"] * 3
        assert [bool(reason) for reason in reasons(found)] == [False, True, False], name


def test_parquet_rows_with_their_pictures(tmp_path: Path) -> None:
    turns = [[{"user": "What?", "assistant": "That."}]] * 3
    pictures = [[{"bytes": data, "path": None}] for data in (picture(), picture()[:70], b"")]
    table = pa.table({"images": pictures, "texts": turns})
    pq.write_table(table, tmp_path / "a.parquet")
    good, cut, empty = lint(tmp_path / "a.parquet")
    assert (good.kind, good.line, good.reason) == ("jsonl", 1, None)
    assert cut.reason and "truncated" in cut.reason
    assert empty.reason


def test_a_folder_with_the_name_of_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "[a-c]*"
    folder.mkdir()
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr("x.png", picture())
    (folder / "a.jsonl").write_text(talk("x.png"))
    assert reasons(lint(folder / "a.jsonl")) == [None]


def test_a_data_uri_is_refused_by_default(tmp_path: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode(picture()).decode()
    (tmp_path / "a.jsonl").write_text(talk(uri))
    (reason,) = reasons(lint(tmp_path / "a.jsonl"))
    assert reason and "data" in reason


# ---- what cannot be linted -----------------------------------------------------------------------


def test_a_name_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*none\.zip"):
        lint(tmp_path / "none.zip")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        lint(tmp_path / "pipe")


def test_a_folder_is_its_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.png").write_bytes(picture())
    (tmp_path / "a.jsonl").write_text(talk("b/x.png"))
    (tmp_path / ".hidden").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.png").symlink_to("nowhere")
    found = lint(tmp_path)
    assert [(os.path.relpath(f.file, tmp_path), f.reason) for f in found] == [
        ("a.jsonl", None),
        ("b/x.png", None),
    ]


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    with open(path, "wb") as file:
        file.write(b"bad")
    (found,) = lint(tmp_path)
    assert json.dumps(found.as_object(digest=False), ensure_ascii=False).encode()


# ---- any bytes -----------------------------------------------------------------------------------

GOOD_ZIP = io.BytesIO()
with zipfile.ZipFile(GOOD_ZIP, "w", zipfile.ZIP_DEFLATED) as _archive:
    _archive.writestr("a.png", picture())
    _archive.writestr("b.txt", "text " * 50)
GOOD = {
    "a.png": picture(),
    "a.jpg": picture(kind="JPEG"),
    "a.webp": picture(kind="WEBP"),
    "a.gif": picture(kind="GIF"),
    "a.tiff": picture(kind="TIFF"),
    "a.zip": GOOD_ZIP.getvalue(),
    "a.jsonl": (talk() + talk("a.png")).encode(),
    "a.json": json.dumps([json.loads(talk())] * 2).encode(),
    "a.jsonl.gz": gzip.compress(talk().encode()),
    "a.jsonl.zip": GOOD_ZIP.getvalue(),
    "a.tar": b"",
    "noname": b"",
}


@given(
    name=st.sampled_from(sorted(GOOD)),
    changes=st.lists(st.tuples(st.integers(0, 2**12), st.binary(max_size=4)), max_size=6),
    cut=st.integers(0, 2**12),
    soup=st.none() | st.binary(max_size=300),
)
@settings(max_examples=120, deadline=None)
@example(name="a.zip", changes=[], cut=4096, soup=b"PK\x05\x06" + bytes(18))
@example(name="a.tar", changes=[], cut=4096, soup=b"\x1f\x8b")
def test_any_bytes_are_findings(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    changes: list[tuple[int, bytes]],
    cut: int,
    soup: bytes | None,
) -> None:
    data = bytearray(GOOD[name] if soup is None else soup)
    for at, new in changes:
        data[at % (len(data) + 1) :][: len(new)] = new
    folder = tmp_path_factory.mktemp("soup")
    (folder / name).write_bytes(data[:cut])
    for finding in lint(folder / name, digest=True):
        assert finding.reason is None or len(finding.reason) > 4
        assert json.dumps(finding.as_object(digest=True))


def test_urls_show_no_credentials() -> None:
    url = "s3://me:hidden@store/a.jsonl?X-Amz-Signature=hidden"
    found = Finding(file=url, kind="jsonl", reason=f"{url}: not there", line=3)
    assert "hidden" not in found.place + json.dumps(found.as_object(digest=False))
