"""Samples with images that are longer than a pack: shrunk or cut off, and built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.small_data import FORMATS, RULES, Data, num_patches, talk

from dataservice.core.packspec import ItemSpec, PackSpec, ShardRef
from dataservice.errors import StaleIndexError
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.objects import ShardReader
from dataservice.storage.records import parse_record

RECORDS = [
    talk("<image>Between <image> and<image>", "Three.", ["small.png", "tall.jpg", "small.png"]),
    talk("All that follows is an image.", "<image>", ["large.jpg"]),
    talk("<image><image>", "Bad comes second. " * 3, ["tall.jpg", "bad.jpg"]),
    {"text": "Beside. "},
]
BAD_COMES_SECOND, TEXT = 2, 3


class Built:
    """The data, and packs built from it."""

    def __init__(self, folder: Path, text: TextRenderer) -> None:
        folder.mkdir()
        self.data = Data(folder, RECORDS)
        self.text = text
        self.reader = ShardReader(None, deadline_s=30, retries=0)
        self.pools = BuildPools(decode_threads=2, read_threads=2)

    def __call__(self, spec: PackSpec, **options: Any) -> BuiltPack:
        values = {
            "reader": self.reader,
            "renderer": self.text,
            "formats": FORMATS,
            "rules": RULES,
            "holes": {},
            "storage_holes": False,
            "decoder": ImageDecoder(RULES, DecodeLimits()),
            "limits": DecodeLimits(),
            "pool": self.pools,
        }
        return build_pack(spec, **(values | options))

    def close(self) -> None:
        self.pools.close()
        self.reader.close()

    def whole(self, number: int, max_pixels: int = RULES.max_pixels) -> tuple[ItemSpec, Any]:
        """The item of the whole sample, and the sample rendered alone."""
        item = self.data.item(number, self.text, max_pixels)
        record = parse_record(self.data.lines[number])
        return item, self.text.render(record, [num_patches(i) // 4 for i in item.images])

    def spans(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """(first token, end) of each image."""
        begins = np.flatnonzero(ids == self.text.special_tokens["<|vision_start|>"])
        ends = np.flatnonzero(ids == self.text.special_tokens["<|vision_end|>"]) + 1
        return list(zip(begins.tolist(), ends.tolist(), strict=True))


@pytest.fixture(scope="module")
def by_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    folder = tmp_path_factory.mktemp("data")
    made = {
        name: Built(folder / name, TextRenderer.build(TextSettings(template=name)))
        for name in ("plain", "chatml")
    }
    yield made
    for built in made.values():
        built.close()


@pytest.fixture(scope="module")
def build(by_template: dict[str, Built]) -> Built:
    return by_template["chatml"]


def inside(stop: int, spans: list[tuple[int, int]]) -> bool:
    return any(begin < stop < end for begin, end in spans)


def cut_at(item: ItemSpec, stop: int, spans: list[tuple[int, int]]) -> ItemSpec:
    kept = sum(end <= stop for _, end in spans)
    return dataclasses.replace(item, stop=stop, kept_images=kept)


@given(
    template=st.sampled_from(["plain", "chatml"]),
    number=st.integers(0, len(RECORDS) - 1),
    max_pixels=st.integers(64, 1600),
    data=st.data(),
)
@settings(deadline=None, max_examples=120)
def test_a_cut_or_shrunk_sample_is_a_prefix_with_whole_images(
    by_template, patches_of, template, number, max_pixels, data
) -> None:
    build = by_template[template]
    item, whole = build.whole(number, max_pixels)
    spans = build.spans(whole.ids)
    places = [p for p in range(1, len(whole.ids) + 1) if not inside(p, spans)]
    cut = cut_at(item, data.draw(st.sampled_from(places)), spans)
    beside = build.data.item(TEXT, build.text)
    built = build(build.data.pack(beside, cut), storage_holes=True)

    start, stop = built.arrays["cu_seqlens"][1:3].tolist()
    ids, labels = (built.arrays[name][start:stop] for name in ("input_ids", "labels"))
    assert ids.tolist() == whole.ids[: cut.stop].tolist()
    expected = np.where(whole.loss, whole.ids, -100)[: cut.stop]
    bad = any(image.member == "bad.jpg" for image in cut.kept)
    assert labels.tolist() == ([-100] * cut.stop if bad else expected.tolist())
    assert len(built.new_holes) == bad

    grids = built.arrays["image_grid_thw"]
    assert built.arrays["image_doc_ids"].tolist() == [1] * cut.kept_images == [1] * len(grids)
    tokens = [int(grid.prod()) // 4 for grid in grids]
    assert [end - begin for begin, end in build.spans(ids)] == [n + 2 for n in tokens]
    assert (ids == build.text.image_token).sum() * 4 == len(built.arrays["pixel_values"])
    pixels = np.split(built.arrays["pixel_values"], np.cumsum(grids.prod(axis=1))[:-1])
    for image, rows in zip(cut.kept, pixels, strict=False):
        width, height = image.target_width, image.target_height
        if image.member == "bad.jpg":
            assert not rows.any()
        else:
            stored = build.data.pictures[image.member]
            assert rows.tobytes() == patches_of(stored, width, height, 4, 2).tobytes()
    suffix = "" if cut.stop == cut.total_tokens else f"[0:{cut.stop}]"
    assert built.meta["sample_keys"][1] == item.key + suffix


def test_shrinking_makes_a_sample_shorter_and_leaves_its_text(build) -> None:
    lengths = [len(build.whole(0, max_pixels)[1].ids) for max_pixels in (1600, 800, 256, 64)]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 4
    for max_pixels in (1600, 64):
        item, whole = build.whole(0, max_pixels)
        built = build(build.data.pack(item))
        kept = whole.ids[whole.ids != build.text.image_token]
        text = build.data.records[0]["conversations"][0]["value"]
        marks = text.replace("<image>", "<|vision_start|><|vision_end|>")
        assert marks in build.text.decode(kept)
        assert built.arrays["input_ids"][: item.stop].tolist() == whole.ids.tolist()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_cut_inside_an_image_is_refused(build, number) -> None:
    item, whole = build.whole(number, 256)
    for begin, end in build.spans(whole.ids):
        before = cut_at(item, begin, build.spans(whole.ids)).kept_images
        for stop in range(begin + 1, end):
            for kept in (before, before + 1):
                cut = dataclasses.replace(item, stop=stop, kept_images=kept)
                with pytest.raises((StaleIndexError, ValueError), match="images"):
                    build(build.data.pack(cut))


def test_a_wrong_number_of_kept_images_is_refused(build) -> None:
    item, whole = build.whole(0)
    spans = build.spans(whole.ids)
    right = cut_at(item, spans[1][0] - 1, spans)
    build(build.data.pack(right))
    for kept in (0, 2, 3):
        wrong = dataclasses.replace(right, kept_images=kept)
        with pytest.raises((StaleIndexError, ValueError), match="images"):
            build(build.data.pack(wrong))


def cut_before_the_bad_image(build: Built) -> ItemSpec:
    item, whole = build.whole(BAD_COMES_SECOND)
    spans = build.spans(whole.ids)
    return cut_at(item, spans[1][0], spans)


def test_an_image_beyond_the_cut_is_neither_read_nor_a_hole(build) -> None:
    item = cut_before_the_bad_image(build)
    offsets = []

    class Watched:
        def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
            if shard.name == "a.zip":
                offsets.append(offset)
            return build.reader.read(shard, offset, size)

        def read_cached(self, shard: ShardRef, offset: int, size: int) -> None:
            return None

    known = {f"{item.key}#1": "truncated JPEG"}
    for holes in ({}, known):
        built = build(build.data.pack(item), reader=Watched(), holes=holes)
        assert built.new_holes == {} and built.meta["holes"] == []
        assert len(built.arrays["pixel_values"]) == num_patches(item.images[0])
        assert built.arrays["pixel_values"].any()
    assert item.images[0].offset in offsets
    assert all(offset < item.images[1].offset for offset in offsets)


def test_a_damaged_record_of_a_cut_sample_has_the_tokens_of_its_kept_images(build) -> None:
    item = dataclasses.replace(cut_before_the_bad_image(build), crc32=5)
    whole = build(build.data.pack(cut_before_the_bad_image(build)))
    built = build(build.data.pack(item))
    (key,) = built.new_holes
    assert key == f"{item.key}#record"
    assert (built.arrays["labels"] == -100).all()
    ids = built.arrays["input_ids"]
    assert (ids[: item.stop] == build.text.image_token).sum() * 4 == num_patches(item.images[0])
    assert (ids == build.text.image_token).sum() * 4 == num_patches(item.images[0])
    for name in ("cu_seqlens", "image_grid_thw", "image_doc_ids", "pixel_values"):
        assert np.array_equal(built.arrays[name], whole.arrays[name])
