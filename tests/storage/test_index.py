from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from storage.bigindex import write_big_index
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip

from dataservice.core.packspec import ShardRef
from dataservice.core.tables import SampleColumns, WindowPlan
from dataservice.core.vision import VisionRules, target_size
from dataservice.errors import StaleIndexError
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.records import parse_record
from dataservice.storage.sources import SourceFiles
from dataservice.storage.zips import read_member

RULES = VisionRules(patch=4, merge=2, min_pixels=64, max_pixels=1600)


def window_of(items: list[tuple[int, int]], packs: list[int]) -> WindowPlan:
    """A window that holds whole samples (source, row), cut into packs at `packs`."""
    source, row = np.array(items, dtype=np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(items), dtype=np.int64)
    by_pack = np.arange(len(packs) - 1, dtype=np.int64)
    return WindowPlan(
        lane=2,
        window=5,
        item_offsets=np.array(packs, dtype=np.int64),
        source=source,
        row=row,
        start=zeros,
        stop=zeros + 9,
        total_tokens=zeros + 9,
        tokens=by_pack + 100,
        image_tokens=by_pack,
        num_images=by_pack,
        num_patches=by_pack + 50,
        loss_tokens=by_pack,
        cost=by_pack,
        dropped_oversize=zeros[:2],
        dropped_empty=zeros[:2],
    )


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
        SourceFiles(name="zipped", jsonl=(f"{data}/[0-9]*.jsonl",)),
        SourceFiles(name="plain", jsonl=(f"{data}/plain.jsonl",), images=(f"{data}/plain",)),
    )
    build_index(sources, str(tmp_path / "index"), counter=ByteCounter())
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
    assert index.sources[0].shard_samples == (3, 0, 3, 3)
    every = samples_of(index.columns(0, np.arange(9)))
    assert every[4] == (14 + 3 + 4, 10, [(20, 31), (21, 31)])
    rng = np.random.default_rng(0)
    for size in (0, 1, 40):
        rows = rng.integers(0, 9, size)
        assert samples_of(index.columns(0, rows)) == [every[row] for row in rows]
    columns = index.columns(0, rows)
    for name in ("text_tokens", "loss_tokens", "image_offsets", "width", "height"):
        assert getattr(columns, name).dtype == np.int64
    for row in (-1, 9):
        with pytest.raises(IndexError, match="source zipped has 9 samples"):
            index.columns(0, np.array([row]))


def test_a_pack_spec_is_all_that_is_needed_to_read_the_pack(index: Index, data: Path) -> None:
    window = window_of([(0, 0), (1, 1), (0, 4), (0, 5), (0, 4)], [0, 1, 5])
    spec = index.pack_spec(window, 1, pack_length=512, rules=RULES)
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
                layout=item.layout,
            )
            assert len(record.images) == len(item.images)
            for name, image in zip(record.images, item.images, strict=True):
                assert image.member == name
                bytes_read = read_member(reader.read, image, spec.shards[image.shard])
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
    window = window_of([(0, 0), (1, 1), (0, 5), (0, 4), (1, 0)], [0, 2, 5])
    found = index.shards_of(window)
    names = [Path(shard.url).name for shard in found]
    assert names[0] == "0.jsonl"
    assert set(names[1:4]) == {"plain.jsonl", "0.jpg", "1.jpg"}
    assert set(names[4:]) == {"1.jsonl", "1.zip"}
    used = {
        shard
        for number in range(2)
        for shard in index.pack_spec(window, number, pack_length=9, rules=RULES).shards
    }
    assert set(found) == used
    for shard in found:
        stat = Path(shard.url).stat()
        assert (shard.size_bytes, shard.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert index.shard_crc(found[0]) == index.manifest.sources[0].shards[0].crc32
    archive = next(shard for shard in found if shard.url.endswith(".zip"))
    assert index.shard_crc(archive) == -1


def test_an_open_index_outlives_the_next_build(index: Index, data: Path) -> None:
    before = samples_of(index.columns(0, np.arange(9)))
    for path in data.glob("?.jsonl"):
        write_jsonl(path, {"text": "new"})
    source = SourceFiles(name="zipped", jsonl=(f"{data}/[0-9]*.jsonl",))
    build_index([source], index.index_dir, counter=ByteCounter())
    assert samples_of(index.columns(0, np.arange(9))) == before
    assert Index.open(index.index_dir).sources[0].shard_samples == (1, 0, 1, 1)
    with pytest.raises(StaleIndexError, match="restart what used the old index"):
        index.columns(1, np.array([0]))


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
    touched = {"samples", "images"} & index._sources[1].shards[0].__dict__.keys()
    assert touched == {"samples", "images"}
    assert "samples" not in index._sources[0].shards[0].__dict__
    column = index._sources[1].shards[0].samples["offset"]
    assert not column.flags.owndata and not column.flags.writeable
    window = window_of([(0, 9_999), (1, 10_000)], [0, 2])
    spec = index.pack_spec(window, 0, pack_length=9, rules=VisionRules())
    assert [item.source for item in spec.items] == ["text", "caption"]
    assert isinstance(spec.shards[0], ShardRef)
