"""What record files and images may look like, from the index's point of view to the bytes."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_tar, write_zip
from storage.windows import window_of

from dataservice.core.vision import VisionRules
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.members import read_image
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import RecordFormat, SourceFiles

RULES = VisionRules(patch=4, merge=2, min_pixels=64, max_pixels=1600)


def built(folder: Path, **fields: Any) -> Index:
    fields = {"name": "s", "records": (f"{folder}/*.jsonl",), **fields}
    index_dir = f"{folder}/index"
    build_index([SourceFiles(**fields)], index_dir, counter=ByteCounter)
    return Index.open(index_dir)


def reasons(index: Index) -> list[str]:
    text = Path(index.index_dir, "rejected.jsonl").read_text()
    return [json.loads(line)["reason"] for line in text.splitlines()]


def images_of(index: Index, fmt: RecordFormat | None = None) -> list[list[bytes]]:
    """The bytes of every image, read as a worker does, by sample."""
    (stats,) = index.sources
    rows = range(sum(stats.shard_samples))
    counts = np.diff(index.columns(0, np.arange(len(rows))).image_offsets).tolist()
    window = window_of([(0, row, counts[row]) for row in rows], [0, len(rows)])
    spec = index.pack_spec(window, 0, rules=RULES)
    assert set(index.shards_of(window)) == set(spec.shards)
    found = []
    with ShardReader(None, deadline_s=10) as reader:
        for item in spec.items:
            images = []
            for image in item.images:
                data = read_image(reader.read, image, spec.shards[image.shard], fmt)
                images.append(data)
                assert data[:4] == b"\x89PNG"
            found.append(images)
    return found


def test_names_may_say_their_archive(tmp_path: Path) -> None:
    one, two, three = (picture(20 + n, 30) for n in range(3))
    write_zip(tmp_path / "roots/x.zip", {"a/1.png": one, "x.zip/b.png": three})
    write_zip(tmp_path / "roots/deep/y.zip", {"a/1.png": two})
    write_jsonl(
        tmp_path / "r.jsonl",
        llava("", "a/1.png", "./a//1.png", "x.zip@/a/1.png", "x.zip/a/1.png"),
        llava("", "y.zip@/a/1.png", "deep/y.zip/a/1.png", "x.zip/b.png"),
        llava("", "y.zip@/none.png"),
        llava("", "z.zip@/a/1.png"),
        llava("", "x.zip@/../a/1.png"),
    )
    index = built(tmp_path, images=(f"{tmp_path}/roots/**/*.zip",))
    assert images_of(index)[1:2] == [[two, two, three]]
    # the first root in the order of the glob has the bare name
    assert images_of(index)[0] == [two, two, one, one]
    assert reasons(index) == [
        "no such image in y.zip: 'none.png'",
        "no such image: 'z.zip@/a/1.png', places searched: 2",
        "image 'x.zip@/../a/1.png' is absolute or leaves its root; it is not read",
    ]


def test_prefixes_are_taken_off_and_put_on(tmp_path: Path) -> None:
    write_zip(tmp_path / "r.zip", {"train/1.png": picture(20, 21), "train/coco/2.png": b"no"})
    write_jsonl(tmp_path / "r.jsonl", llava("", "coco/1.png"), llava("", "1.png"))
    index = built(tmp_path, strip_prefix="coco/", add_prefix="train/")
    assert [len(images) for images in images_of(index)] == [1, 1]


def test_tars_beside_and_as_roots(tmp_path: Path) -> None:
    one, two, three = (picture(20 + n, 30) for n in range(3))
    write_tar(tmp_path / "r.tar", {"1.png": one})
    write_zip(tmp_path / "roots/a.zip", {"1.png": two, "2.png": two})
    write_tar(tmp_path / "roots/b.tar", {"2.png": three, "deep/3.png": three})
    write_jsonl(tmp_path / "r.jsonl", llava("", "1.png", "2.png", "deep/3.png"))
    index = built(tmp_path, images=(f"{tmp_path}/roots/*",))
    assert images_of(index) == [[one, two, three]]
    assert [archive.kind for archive in index.manifest.archives] == ["tar", "zip", "tar"]
    spec = index.pack_spec(window_of([(0, 0, 3)], [0, 1]), 0, rules=RULES)
    assert [image.method for image in spec.items[0].images] == [-1, 0, -1]


def test_images_in_the_records_themselves(tmp_path: Path) -> None:
    one, two = picture(33, 44), picture(55, 66)
    write_zip(tmp_path / "r.zip", {"2.png": two})
    uri = "data:image/png;base64," + base64.b64encode(one).decode()
    write_jsonl(
        tmp_path / "r.jsonl",
        {"text": "before"},
        llava("", "2.png", uri),
        llava("", uri, "2.png", uri),
        llava("", "data:image/png;base64,AAAA"),
    )
    fmt = RecordFormat(data_uris=True)
    index = built(tmp_path, format=fmt)
    assert images_of(index, fmt) == [[], [two, one], [one, two, one], []]
    columns = index.columns(0, np.arange(4))
    assert columns.width.tolist() == [55, 33, 33, 55, 33]
    assert [reason.split(":")[1] for reason in reasons(index)] == ["image/png;base64,AAAA'"]
    refused = built(tmp_path)
    assert "data:" in reasons(refused)[0]


def test_images_in_a_parquet_file(tmp_path: Path) -> None:
    one, two = picture(33, 44), picture(55, 66)
    texts = [{"user": "What?", "assistant": "A."}]
    images = [
        [{"bytes": one, "path": "1.png"}],
        None,
        [{"bytes": two, "path": None}, {"bytes": one, "path": None}],
        [{"bytes": b"GIF", "path": "x"}],
    ]
    rows = [{"images": value, "texts": texts} for value in images]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    index = built(tmp_path, records=(f"{tmp_path}/*.parquet",))
    assert images_of(index) == [[one], [], [two, one], []]
    assert index.columns(0, np.arange(4)).height.tolist() == [44, 66, 44]
    assert len(reasons(index)) == 1
    assert index.sources[0].shard_vision_samples == (2,)


@pytest.mark.parametrize("packing", ["gz", "zst", "zip"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_packed_records_find_the_archive_of_their_stem(
    tmp_path: Path, packing: str, kind: str
) -> None:
    one = picture(20, 21)
    write_zip(tmp_path / "r.zip", {"1.png": one})
    records = [llava("x", "1.png"), {"text": "plain"}]
    text = json.dumps(records) if kind == "json" else "\n".join(map(json.dumps, records))
    path = tmp_path / f"r.{kind}.{packing}"
    if packing == "gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif packing == "zst":
        path.write_bytes(zstandard.compress(text.encode()))
    else:
        write_zip(path, {f"r.{kind}": text.encode()}, 8)
    index = built(tmp_path, records=(str(path),))
    assert images_of(index) == [[one], []]
    (shard,) = index.manifest.sources[0].shards
    assert (shard.packing, shard.unpacked_bytes) == (packing, len(text.encode()))
    assert shard.num_rejected == 0


def test_sizes_of_the_record_are_believed(tmp_path: Path) -> None:
    write_zip(tmp_path / "r.zip", {"1.png": picture(20, 30), "2.png": picture(21, 31)})
    write_jsonl(
        tmp_path / "r.jsonl",
        llava("", "1.png", width=200, height=300),
        llava("", "1.png"),
        llava("", "1.png", width=0, height=-3),
        llava("", "2.png", "2.png", width_list=[5, 21], height_list=[6, 31]),
        llava("", "none.png", width=5, height=5),
        llava("", "1.png", width=2000, height=5),  # too elongated to be a picture
        llava("", "1.png", width=60_000, height=60_000),
    )
    index = built(tmp_path)
    columns = index.columns(0, np.arange(7))
    assert columns.width.tolist() == [200, 20, 20, 5, 21, 20, 20]
    probed = index._sources[0].shards[0].images["probed"].slice(0, 7)
    assert probed.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert reasons(index) == ["no such image: 'none.png', places searched: 1"]


def test_a_member_that_cannot_be_read_is_no_image_whatever_the_record_says(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "r.zip", {"1.png": picture(20, 30), "2.png": picture(20, 30)})
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 8] |= 1  # encrypted
    path.write_bytes(data)
    write_jsonl(
        tmp_path / "r.jsonl",
        llava("", "1.png", width=20, height=30),
        llava("", "2.png", width=20, height=30),
        llava("", "2.png"),
    )
    index = built(tmp_path)
    assert index.sources[0].shard_vision_samples == (1,)
    assert reasons(index) == ["image '2.png': the member is encrypted (in r.zip)"] * 2


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6]),
        ("first:3", [0, 1, 2]),
        ("first:99", [0, 1, 2, 3, 4, 5, 6]),
        ("end:4", [3, 4, 5, 6]),
        ("first:50%", [0, 1, 2]),
        ("end:1%", [6]),
        ("first:0", []),
    ],
)
def test_some_of_the_records_are_taken(tmp_path: Path, take: str, expected: list[int]) -> None:
    texts = [b"bad" if n == 1 else {"text": "x" * (n + 1)} for n in range(7)]
    write_jsonl(tmp_path / "a.jsonl", *texts[:4])
    write_jsonl(tmp_path / "b.jsonl", *texts[4:])
    index = built(tmp_path, take=take)
    (stats,) = index.sources
    tokens = index.columns(0, np.arange(len(expected))).text_tokens.tolist()
    assert sum(stats.shard_samples) == len(expected)
    assert tokens == [0 if n == 1 else n + 1 for n in expected]
    assert len(reasons(index)) == (1 in expected)
    manifest = index.manifest
    again = built(tmp_path, take=take).manifest
    assert again == manifest


def test_records_are_drawn_at_random_and_always_the_same(tmp_path: Path) -> None:
    for shard in range(3):
        write_jsonl(
            tmp_path / f"{shard}.jsonl", *[{"text": "x" * (shard * 40 + n + 1)} for n in range(40)]
        )
    index = built(tmp_path, take="random:25%")
    assert index.sources[0].shard_samples == (10, 10, 10)
    tokens = index.columns(0, np.arange(30)).text_tokens.tolist()
    assert tokens == sorted(set(tokens)) and tokens != list(range(1, 31))
    assert [token % 40 for token in tokens[:10]] != [token % 40 for token in tokens[10:20]]
    again = built(tmp_path, take="random:30")
    assert again.columns(0, np.arange(30)).text_tokens.tolist() == tokens
