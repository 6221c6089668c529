from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.bigindex import write_big_index
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip
from storage.windows import window_of

from dataservice.core.packspec import ShardRef
from dataservice.core.settings import Kind
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import VisionRules, target_size
from dataservice.errors import StaleIndexError
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.members import read_image
from dataservice.storage.objects import ShardReader
from dataservice.storage.records import parse_record
from dataservice.storage.sources import RecordFormat, SourceFiles
from dataservice.storage.tables import Stored

RULES = VisionRules(patch=4, merge=2, min_pixels=64, max_pixels=1600)
KINDS: tuple[tuple[Kind, bool], ...] = (("text", False), ("vision", True))
"""Each with whether its samples have images."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for shard in range(3):
        images = {f"{shard}-{number}.png": picture(20 + number, 30 + shard) for number in range(4)}
        write_zip(folder / f"{shard}.zip", images)
        names = list(images)
        write_jsonl(
            folder / f"{shard}.jsonl",
            llava(f"no image {shard}"),
            llava("two", *names[:2]),
            b"{",
            llava("one", names[3]),
        )
    write_jsonl(folder / "00.jsonl")
    (folder / "plain").mkdir()
    for number in range(2):
        (folder / f"plain/{number}.jpg").write_bytes(picture(64, 48 + number, "JPEG"))
    write_jsonl(folder / "plain.jsonl", llava("x", "0.jpg"), llava("y", "1.jpg", "0.jpg"))
    return folder


@pytest.fixture
def index(data: Path, tmp_path: Path) -> Index:
    sources = (
        SourceFiles(name="zipped", records=(f"{data}/[0-9]*.jsonl",)),
        SourceFiles(name="plain", records=(f"{data}/plain.jsonl",), images=(f"{data}/plain",)),
    )
    build_index(sources, str(tmp_path / "index"), counter=ByteCounter)
    return Index.open(str(tmp_path / "index"))


def samples_of(columns: SampleColumns) -> list[tuple[int, int, list[tuple[int, int]]]]:
    bounds = columns.image_offsets.tolist()
    sizes = list(zip(columns.width.tolist(), columns.height.tolist(), strict=True))
    return [
        (text, loss, sizes[bounds[row] : bounds[row + 1]])
        for row, (text, loss) in enumerate(
            zip(columns.text_tokens.tolist(), columns.loss_tokens.tolist(), strict=True)
        )
    ]


def test_columns_come_in_the_order_asked_for(index: Index) -> None:
    assert index.sources[0].shard_samples == (4, 0, 4, 4)
    every = samples_of(index.columns(0, np.arange(12)))
    assert every[5] == (14 + 3 + 4, 10, [(20, 31), (21, 31)])
    assert every[6] == (0, 0, [])
    rng = np.random.default_rng(0)
    for size in (0, 1, 40):
        rows = rng.integers(0, 12, size)
        assert samples_of(index.columns(0, rows)) == [every[row] for row in rows]
    columns = index.columns(0, rows)
    for field in dataclasses.fields(columns):
        assert getattr(columns, field.name).dtype == np.int64
    for row in (-1, 12):
        with pytest.raises(IndexError, match="source zipped has 12 samples"):
            index.columns(0, np.array([row]))


def test_rows_of_several_sources_are_read_at_once(index: Index) -> None:
    sizes = [sum(stats.shard_samples) for stats in index.sources]
    every = [samples_of(index.columns(i, np.arange(size))) for i, size in enumerate(sizes)]
    rng = np.random.default_rng(1)
    source = rng.integers(0, len(sizes), 50)
    rows = rng.integers(0, np.array(sizes)[source])
    assert samples_of(index.columns(source, rows)) == [
        every[of][row] for of, row in zip(source, rows, strict=True)
    ]
    of = np.array([1, 0, 1])
    found = index.rows_of_kind(of, "vision", np.array([1, 2, 0]))
    assert found.tolist() == [
        int(index.rows_of_kind(int(s), "vision", np.array([n]))[0])
        for s, n in zip(of, (1, 2, 0), strict=True)
    ]
    with pytest.raises(IndexError, match=f"has {sizes[1]} samples, number {sizes[1]} was asked"):
        index.columns(np.array([0, 1]), np.array([0, sizes[1]]))


def test_a_pack_spec_is_all_that_is_needed_to_read_the_pack(index: Index, data: Path) -> None:
    window = window_of([(0, 0, 0), (1, 1, 2), (0, 5, 2), (0, 7, 1), (0, 5, 2)], [0, 1, 5])
    spec = index.pack_spec(window, 1, rules=RULES)
    assert (spec.pack_id, spec.pack_length) == ("2.5.1", 512)
    assert (spec.num_tokens, spec.num_patches) == (101, 51)
    assert len(set(spec.shards)) == len(spec.shards)
    keys = [item.key for item in spec.items]
    assert keys[0].startswith("plain/plain.jsonl@") and keys[1].startswith("zipped/1.jsonl@")
    assert keys[1] == keys[3] != keys[2]
    with ShardReader(None, deadline_s=10) as reader:
        for item in spec.items:
            record = parse_record(
                reader.read(spec.shards[item.shard], item.offset, item.length),
                RecordFormat(layout=item.layout),
            )
            assert len(record.images) == len(item.images)
            for name, image in zip(record.images, item.images, strict=True):
                assert image.member == name
                bytes_read = read_image(reader.read, image, spec.shards[image.shard])
                folder, zip_name = data / "plain", data / "1.zip"
                if item.source == "plain":
                    assert bytes_read == (folder / name).read_bytes()
                    assert spec.shards[image.shard].name == f"plain/{name}"
                    assert image.crc32 == -1
                else:
                    assert bytes_read == picture(image.width, image.height)
                    assert spec.shards[image.shard].url == str(zip_name)
                assert (image.target_height, image.target_width) == target_size(
                    image.height, image.width, patch=4, merge=2, min_pixels=64, max_pixels=1600
                )


def test_shards_of_a_window_in_the_order_of_need(index: Index, data: Path) -> None:
    window = window_of([(0, 0, 0), (1, 1, 2), (0, 7, 1), (0, 5, 2), (1, 0, 1)], [0, 2, 5])
    found = index.shards_of(window)
    names = [Path(shard.url).name for shard in found]
    assert names[0] == "0.jsonl"
    assert set(names[1:4]) == {"plain.jsonl", "0.jpg", "1.jpg"}
    assert set(names[4:]) == {"1.jsonl", "1.zip"}
    used = {
        shard
        for number in range(2)
        for shard in index.pack_spec(window, number, rules=RULES).shards
    }
    assert set(found) == used
    for shard in found:
        stat = Path(shard.url).stat()
        assert (shard.size_bytes, shard.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert index.shard_crc(found[0]) == index.manifest.sources[0].shards[0].crc32
    archive = next(shard for shard in found if shard.url.endswith(".zip"))
    assert index.shard_crc(archive) == -1


def test_where_images_stand(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip", {"1.png": picture(20, 30)})
    turns = [("human", "See <image> and<image>"), ("gpt", "\u00e9<image>")]
    write_jsonl(
        tmp_path / "a.jsonl",
        {"text": "no image"},
        {
            "image": ["1.png"] * 3,
            "conversations": [{"from": role, "value": text} for role, text in turns],
        },
        llava("", "1.png"),
    )
    source = SourceFiles(name="s", records=(f"{tmp_path}/a.jsonl",))
    build_index([source], str(tmp_path / "index"), counter=ByteCounter)
    columns = Index.open(str(tmp_path / "index")).columns(0, np.array([2, 0, 1]))
    assert columns.image_offsets.tolist() == [0, 1, 1, 4]
    assert columns.text_before is not None and columns.markup is not None
    assert columns.text_before.tolist() == [0, 4, 4 + 7 + 4, 4 + 7 + 4 + 7 + 2]
    assert columns.markup.tolist() == [7] * 4


def test_rows_of_a_kind_count_over_all_shards(index: Index) -> None:
    zipped, plain = index.sources
    assert zipped.shard_text_samples == (1, 0, 1, 1)
    assert plain.shard_text_samples == (0,)
    rng = np.random.default_rng(0)
    for (kind, _), expected in zip(KINDS, ([0, 4, 8], [1, 3, 5, 7, 9, 11]), strict=True):
        for size in (0, 1, 30):
            numbers = rng.integers(0, len(expected), size)
            rows = index.rows_of_kind(0, kind, numbers)
            assert rows.dtype == np.int64
            assert rows.tolist() == [expected[number] for number in numbers]
        for number in (-1, len(expected)):
            with pytest.raises(IndexError, match=f"zipped has {len(expected)} {kind} samples"):
                index.rows_of_kind(0, kind, np.array([number]))
    assert index.rows_of_kind(1, "vision", np.array([1, 0])).tolist() == [1, 0]
    with pytest.raises(IndexError, match="plain has 0 text samples"):
        index.rows_of_kind(1, "text", np.array([0]))


@given(kinds=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6))
@settings(deadline=None, max_examples=12)
def test_kinds_part_the_rows_of_any_shards(kinds: list[list[bool]]) -> None:
    """`kinds` says of each shard's samples whether they have an image."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_zip(folder / "all.zip", {"1.png": picture(20, 30)})
        for number, shard in enumerate(kinds):
            records = [llava("x", "1.png") if vision else {"text": "x"} for vision in shard]
            write_jsonl(folder / f"{number}.jsonl", *records)
        source = SourceFiles(
            name="s", records=(f"{folder}/*.jsonl",), images=(f"{folder}/all.zip",)
        )
        build_index([source], f"{folder}/index", counter=ByteCounter)
        index = Index.open(f"{folder}/index")
        flat = [vision for shard in kinds for vision in shard]
        for kind, wanted in KINDS:
            expected = [row for row, vision in enumerate(flat) if vision == wanted]
            assert index.rows_of_kind(0, kind, np.arange(len(expected))).tolist() == expected
        (stats,) = index.sources
        assert stats.shard_samples == tuple(len(shard) for shard in kinds)
        assert stats.shard_text_samples == tuple(shard.count(False) for shard in kinds)


def test_an_item_has_its_own_max_pixels(index: Index) -> None:
    window = window_of([(0, 5, 2), (1, 0, 1), (0, 5, 2)], [0, 3], image_limit=[300, 1600, 32])
    spec = index.pack_spec(window, 0, rules=RULES)
    for item, most in zip(spec.items, (300, 1600, 32), strict=True):
        assert item.kept_images == len(item.images) == len(item.kept)
        for image in item.images:
            assert (image.target_height, image.target_width) == target_size(
                image.height,
                image.width,
                patch=4,
                merge=2,
                min_pixels=min(64, most),
                max_pixels=most,
            )
    sizes = [(item.images[0].target_width, item.images[0].target_height) for item in spec.items]
    assert len(set(sizes)) == 3 and sizes[2] == (8, 8)  # no image is smaller than one token


def test_images_that_are_cut_off_are_in_the_spec_but_not_needed(index: Index) -> None:
    window = window_of([(1, 1, 1), (0, 5, 0)], [0, 2])
    spec = index.pack_spec(window, 0, rules=RULES)
    assert [len(item.images) for item in spec.items] == [2, 2]
    assert [[image.member for image in item.kept] for item in spec.items] == [["1.jpg"], []]
    names = [Path(shard.url).name for shard in index.shards_of(window)]
    assert names == ["plain.jsonl", "1.jpg", "1.jsonl"]


def test_an_open_index_outlives_the_next_build(index: Index, data: Path) -> None:
    before = samples_of(index.columns(0, np.arange(12)))
    for path in data.glob("?.jsonl"):
        write_jsonl(path, {"text": "new"})
    source = SourceFiles(name="zipped", records=(f"{data}/[0-9]*.jsonl",))
    build_index([source], index.index_dir, counter=ByteCounter)
    assert samples_of(index.columns(0, np.arange(12))) == before
    assert Index.open(index.index_dir).sources[0].shard_samples == (1, 0, 1, 1)
    index.columns(1, np.array([0]))  # mapped for the first time
    for shard in index.manifest.sources[1].shards:
        os.unlink(Path(index.index_dir, shard.samples.name))
    fresh = Index(index.index_dir, index.manifest)
    with pytest.raises(StaleIndexError, match="restart what used the old index"):
        fresh.columns(1, np.array([0]))


def test_damage_is_refused(index: Index) -> None:
    folder = Path(index.index_dir)
    manifest = folder / "manifest.json"
    table = folder / index.manifest.sources[0].shards[0].samples.name
    good = manifest.read_bytes()

    table.write_bytes(table.read_bytes()[:-8])
    with pytest.raises(StaleIndexError, match=r"samples\.arrow has \d+ bytes"):
        Index.open(str(folder)).columns(0, np.array([0]))

    changed = json.loads(good)
    changed["sources"][0]["shards"][0]["num_samples"] += 1
    for content, reason in (
        (json.dumps(changed).encode(), "digest does not match"),
        (json.dumps({**changed, "version": 99}).encode(), "is of version 99"),
        (good[:100], "cannot be read"),
        (b"[]", "is of version None"),
    ):
        manifest.write_bytes(content)
        with pytest.raises(StaleIndexError, match=reason):
            Index.open(str(folder))


def test_a_large_index_costs_only_the_rows_asked_for(tmp_path: Path) -> None:
    write_big_index(tmp_path, rows=20_001, shards=8)
    index = Index.open(str(tmp_path))
    assert [sum(source.shard_samples) for source in index.sources] == [10_000, 10_001]
    rows = np.arange(3, 10_001, 977)
    assert np.diff(index.columns(1, rows).image_offsets).tolist() == [1] * len(rows)
    text, caption = (source.shards for source in index._sources)
    assert caption[0].entry.samples.name in index.tables._tables
    assert text[0].entry.samples.name not in index.tables._tables
    column = caption[0].samples["crc32"]
    assert isinstance(column, Stored)
    assert not column.values.flags.owndata and not column.values.flags.writeable
    window = window_of([(0, 9_999, 0), (1, 10_000, 1)], [0, 2])
    spec = index.pack_spec(window, 0, rules=VisionRules())
    assert [item.source for item in spec.items] == ["text", "caption"]
    assert isinstance(spec.shards[0], ShardRef)
