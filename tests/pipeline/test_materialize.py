from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline.small_data import FORMATS, RULES, Data, num_patches

from dataservice.core.packspec import PackSpec, ShardRef
from dataservice.errors import StaleIndexError, StorageError, StorageTimeout
from dataservice.pipeline import images
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.objects import ShardReader, staged_path

LONG_S = 30.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text() -> TextRenderer:
    return TextRenderer.build(TextSettings())


@pytest.fixture
def reader() -> Iterator[ShardReader]:
    with ShardReader(None, deadline_s=LONG_S, retries=0) as made:
        yield made


@pytest.fixture
def pools() -> Iterator[BuildPools]:
    with BuildPools(decode_threads=2, read_threads=3) as made:
        yield made


@pytest.fixture
def build(reader, pools, text):
    def built(spec: PackSpec, **options) -> BuiltPack:
        values = {
            "reader": reader,
            "renderer": text,
            "formats": FORMATS,
            "rules": RULES,
            "holes": {},
            "storage_holes": False,
            "decoder": ImageDecoder(RULES, DecodeLimits()),
            "limits": DecodeLimits(),
            "pool": pools,
        }
        return build_pack(spec, **(values | options))

    return built


def same_arrays(a: BuiltPack, b: BuiltPack) -> bool:
    return a.arrays.keys() == b.arrays.keys() and all(
        a.arrays[name].dtype == b.arrays[name].dtype
        and a.arrays[name].shape == b.arrays[name].shape
        and a.arrays[name].tobytes() == b.arrays[name].tobytes()
        for name in a.arrays
    )


def test_layout_text_and_pixels(data, text, build, patches_of) -> None:
    spec = data.pack(*(data.item(i, text) for i in (1, 0, 3)), room=9)
    built = build(spec)
    arrays = built.arrays
    dtypes = {name: (str(a.dtype), a.shape) for name, a in arrays.items()}
    assert dtypes == {
        "input_ids": ("int32", (spec.pack_length,)),
        "labels": ("int32", (spec.pack_length,)),
        "cu_seqlens": ("int32", (5,)),
        "doc_lengths": ("int32", (4,)),
        "pixel_values": ("uint8", (spec.num_patches, 48)),
        "image_grid_thw": ("int32", (3, 3)),
        "image_doc_ids": ("int32", (3,)),
    }
    bounds = arrays["cu_seqlens"].tolist()
    lengths = [item.total_tokens for item in spec.items]
    assert bounds == [0, *np.cumsum(lengths).tolist(), spec.pack_length]
    assert arrays["doc_lengths"].tolist() == [*lengths, 9]
    documents = [text.decode(arrays["input_ids"][a:b]) for a, b in itertools.pairwise(bounds)]
    merged = [num_patches(i) // 4 for item in spec.items for i in item.images]
    spans = [f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in merged]
    assert documents == [
        f"<|im_start|>user\nLook: {spans[0]} and {spans[1]}!<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n",
        "A first text, äöü.<|endoftext|>",
        f"<|im_start|>user\n{spans[2]}<|im_end|>\n<|im_start|>assistant\nTall.<|im_end|>\n",
        "<|endoftext|>" * 9,
    ]
    labels = arrays["labels"]
    assert (labels[bounds[-2] :] == -100).all()
    assert (labels[bounds[:-1]] == -100).all()
    assert "".join(text.decode(labels[labels >= 0])) == (
        "Two.<|im_end|>" + " first text, äöü.<|endoftext|>" + "Tall.<|im_end|>"
    )
    assert (arrays["input_ids"][labels >= 0] == labels[labels >= 0]).all()
    images = [image for item in spec.items for image in item.images]
    expected = [
        patches_of(data.pictures[i.member], i.target_width, i.target_height, 4, 2) for i in images
    ]
    assert arrays["pixel_values"].tobytes() == b"".join(e.tobytes() for e in expected)
    assert arrays["image_grid_thw"].tolist() == [
        [1, i.target_height // 4, i.target_width // 4] for i in images
    ]
    assert arrays["image_doc_ids"].tolist() == [0, 0, 2]
    assert built.meta == {
        "pack_id": "0.0.1",
        "sample_keys": [item.key for item in spec.items],
        "num_docs": 3,
        "holes": [],
    }
    assert built.new_holes == {}


def test_a_full_pack_has_no_padding_segment(data, text, build) -> None:
    spec = data.pack(data.item(0, text), room=0)
    built = build(spec)
    assert built.arrays["cu_seqlens"].tolist() == [0, spec.pack_length]
    assert built.meta["num_docs"] == 1
    assert built.arrays["pixel_values"].shape == (0, 48)
    assert built.arrays["image_grid_thw"].shape == (0, 3)
    assert built.arrays["image_doc_ids"].shape == (0,)


def test_a_padding_pack(build, text) -> None:
    spec = PackSpec(pack_id="pad", pack_length=32, shards=(), items=(), num_tokens=0, num_patches=0)
    built = build(spec)
    assert (built.arrays["input_ids"] == text.pad_token).all()
    assert (built.arrays["labels"] == -100).all()
    assert built.arrays["cu_seqlens"].tolist() == [0, 32]
    assert built.meta["num_docs"] == 0


def test_pieces_of_a_long_text(data, text, build) -> None:
    whole = data.item(2, text)
    cuts = [0, 100, 101, whole.total_tokens]
    pieces = [dataclasses.replace(whole, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    built = build(data.pack(*pieces))
    ids = built.arrays["input_ids"][: whole.total_tokens]
    alone = build(data.pack(whole)).arrays["input_ids"][: whole.total_tokens]
    assert ids.tolist() == alone.tolist()
    labels = built.arrays["labels"]
    expected = ids.copy()
    expected[cuts[:-1]] = -100
    assert labels[: whole.total_tokens].tolist() == expected.tolist()
    assert built.arrays["cu_seqlens"].tolist() == [*cuts, cuts[-1] + 7]


def test_every_number_of_threads_builds_the_same_bytes(data, text, build) -> None:
    spec = data.pack(*(data.item(i, text) for i in (4, 1, 2, 3, 5, 0)))
    first = build(spec)
    for decode_threads, read_threads in ((1, 1), (4, 16)):
        with BuildPools(decode_threads=decode_threads, read_threads=read_threads) as pools:
            again = build(spec, pool=pools)
        assert same_arrays(again, first)
        assert again.meta == first.meta and again.new_holes == first.new_holes


def assert_hole(built: BuiltPack, spec: PackSpec, item: int, image: int) -> None:
    """Zeros and masked labels there, and nothing else than in the pack without this hole."""
    starts = np.cumsum([0] + [num_patches(i) for it in spec.items for i in it.images])
    number = sum(len(it.images) for it in spec.items[:item]) + image
    pixels = built.arrays["pixel_values"]
    assert not pixels[starts[number] : starts[number + 1]].any()
    bounds = built.arrays["cu_seqlens"]
    assert (built.arrays["labels"][bounds[item] : bounds[item + 1]] == -100).all()


def test_a_damaged_picture_becomes_a_hole(data, text, build) -> None:
    spec = data.pack(*(data.item(i, text) for i in (5, 3)))
    built = build(spec)
    key = f"{spec.items[0].key}#0"
    assert list(built.new_holes) == [key]
    reason = built.new_holes[key]
    assert reason.startswith("truncated JPEG: image file is truncated (")
    assert built.meta["holes"] == [f"{key}: {reason} (bad.jpg in src/a.zip)"]
    assert_hole(built, spec, 0, 0)
    pixels = built.arrays["pixel_values"]
    bad, tall = num_patches(data.image("bad.jpg")), num_patches(data.image("tall.jpg"))
    # The other picture of the sample, and the other sample, are whole.
    assert (pixels[bad : bad + tall] == pixels[bad + tall :]).all() and pixels[bad:].any()
    assert (built.arrays["labels"] >= 0).sum() == len("Tall.") + 1
    again = build(spec, holes=built.new_holes)
    assert same_arrays(again, built) and again.meta == built.meta
    assert again.new_holes == {}


@pytest.mark.parametrize("bad", ["picture", "record", "member"])
def test_a_pack_with_a_hole_is_freed_without_the_garbage_collector(data, text, build, bad) -> None:
    items = [data.item(5 if bad == "picture" else 1, text), data.item(3, text)]
    if bad == "record":
        items[0] = dataclasses.replace(items[0], crc32=5)
    if bad == "member":
        images = tuple(dataclasses.replace(i, offset=i.offset + 1) for i in items[0].images)
        items[0] = dataclasses.replace(items[0], images=images)
    gc.disable()
    try:
        built = build(data.pack(*items))
        assert built.new_holes
        pixels = weakref.ref(built.arrays["pixel_values"])
        del built
        until = time.monotonic() + LONG_S
        while pixels() is not None and time.monotonic() < until:
            time.sleep(0.01)  # a thread of the pool may not have let go of its last task
        assert pixels() is None
    finally:
        gc.enable()


def test_a_fallback_is_gray_and_its_sample_keeps_its_labels(data, text, build) -> None:
    spec = data.pack(*(data.item(i, text) for i in (5, 3)))
    hole = build(spec)
    built = build(spec, bad_image="fallback")
    key = f"{spec.items[0].key}#0"
    assert built.new_holes == hole.new_holes
    assert built.meta["holes"] == [
        f"{key}: fallback: {built.new_holes[key]} (bad.jpg in src/a.zip)"
    ]
    bad = num_patches(data.image("bad.jpg"))
    pixels = built.arrays["pixel_values"]
    assert (pixels[:bad] == 127).all()
    assert np.array_equal(pixels[bad:], hole.arrays["pixel_values"][bad:])
    assert (built.arrays["labels"] >= 0).sum() == len("One is bad.") + len("Tall.") + 2
    masked = hole.arrays["labels"] == -100
    assert (np.where(masked, -100, built.arrays["labels"]) == hole.arrays["labels"]).all()
    for name in built.arrays.keys() - {"labels", "pixel_values"}:
        assert np.array_equal(built.arrays[name], hole.arrays[name])
    again = build(spec, holes=built.new_holes, bad_image="fallback")
    assert same_arrays(again, built) and again.meta == built.meta and again.new_holes == {}


def test_a_record_that_cannot_be_read_has_no_fallback(data, text, build) -> None:
    spec = data.pack(dataclasses.replace(data.item(5, text), crc32=5), data.item(3, text))
    hole, built = build(spec), build(spec, bad_image="fallback")
    record, picture = (f"{spec.items[0].key}#{what}" for what in ("record", 0))
    assert set(built.new_holes) == {record, picture}
    assert [h.partition(": ")[0] for h in built.meta["holes"]] == [record, picture]
    assert "fallback" not in built.meta["holes"][0]
    assert np.array_equal(built.arrays["labels"], hole.arrays["labels"])
    assert np.array_equal(built.arrays["input_ids"], hole.arrays["input_ids"])


def test_a_known_hole_is_not_read_and_other_holes_do_not_matter(data, text, build, reader) -> None:
    spec = data.pack(data.item(1, text), data.item(3, text))
    key = f"{spec.items[0].key}#0"
    members = []

    class Watched:
        def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
            if shard.name == "a.zip":
                members.append(offset)
            return reader.read(shard, offset, size)

        def read_cached(self, shard: ShardRef, offset: int, size: int) -> None:
            return None

    built = build(spec, reader=Watched(), holes={key: "said before", "other#0": "elsewhere"})
    assert_hole(built, spec, 0, 0)
    assert built.meta["holes"] == [f"{key}: said before (large.jpg in src/a.zip)"]
    assert built.new_holes == {}
    assert data.image("large.jpg").offset not in members and len(members) == 2


def test_a_sample_that_stands_twice_is_a_hole_twice(data, text, build, monkeypatch) -> None:
    spec = data.pack(data.item(3, text), data.item(3, text))
    whole = build(spec)
    real, calls = images.decode, []

    def fails_once(*arguments):
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(images, "decode", fails_once)
    built = build(spec, limits=DecodeLimits(deadline_s=0.1))
    assert list(built.new_holes) == [f"{spec.items[0].key}#0"]
    assert_hole(built, spec, 0, 0)
    assert_hole(built, spec, 1, 0)
    assert whole.arrays["pixel_values"].any()


def test_a_bad_member_is_a_hole(data, text, build) -> None:
    item = data.item(3, text)
    image = dataclasses.replace(item.images[0], crc32=1)
    spec = data.pack(dataclasses.replace(item, images=(image,)))
    built = build(spec)
    (reason,) = built.new_holes.values()
    assert reason.startswith("CRC mismatch")
    assert built.meta["holes"][0].endswith(f"{reason} (tall.jpg in src/a.zip)")
    assert_hole(built, spec, 0, 0)


class Failing:
    """Fails, or hangs, on pictures only."""

    def __init__(self, reader: ShardReader, action, shard: str = "a.zip") -> None:
        self._reader, self._action, self._shard = reader, action, shard

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
        if shard.name == self._shard:
            self._action()
        return self._reader.read(shard, offset, size)

    def read_cached(self, shard: ShardRef, offset: int, size: int) -> bytes | None:
        at_hand = shard.name != self._shard
        return self._reader.read_cached(shard, offset, size) if at_hand else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def raise_storage_error() -> None:
    raise StorageError("the disk is away")


def test_storage_errors_are_holes_only_when_told(data, text, build, reader) -> None:
    spec = data.pack(data.item(3, text))
    failing = Failing(reader, raise_storage_error)
    with pytest.raises(StorageError, match="the disk is away"):
        build(spec, reader=failing)
    built = build(spec, reader=failing, storage_holes=True)
    assert list(built.new_holes.values()) == ["could not be read: the disk is away"]
    assert_hole(built, spec, 0, 0)
    records_away = Failing(reader, raise_storage_error, "a.jsonl")
    with pytest.raises(StorageError, match="the disk is away"):
        build(spec, reader=records_away)
    built = build(spec, reader=records_away, storage_holes=True)
    assert built.new_holes == {f"{spec.items[0].key}#record": "the disk is away"}


def test_a_stale_archive_is_no_hole(data, text, build) -> None:
    spec = data.pack(data.item(3, text))
    stale = dataclasses.replace(data.shards[1], size_bytes=data.shards[1].size_bytes + 1)
    with pytest.raises(StaleIndexError, match=r"a\.zip"):
        build(dataclasses.replace(spec, shards=(data.shards[0], stale)), storage_holes=True)


def test_a_read_over_its_deadline(data, text, build, reader) -> None:
    gate = threading.Event()
    spec = data.pack(data.item(3, text))
    limits = DecodeLimits(read_deadline_s=0.1)
    hanging = Failing(reader, lambda: gate.wait(LONG_S))
    with BuildPools(decode_threads=1, read_threads=2) as pools:
        with pytest.raises(
            StorageTimeout, match=r"reading tall\.jpg in src/a\.zip took longer than 0\.1 s"
        ):
            build(spec, reader=hanging, limits=limits, pool=pools)
        built = build(spec, reader=hanging, limits=limits, pool=pools, storage_holes=True)
        assert_hole(built, spec, 0, 0)
        before = {name: a.tobytes() for name, a in built.arrays.items()}
        gate.set()  # the reads end now, and must start no decode into the pack
        wait_until(lambda: pools.reads.stuck == 0)
        assert pools.decodes.completed == 0
        assert {name: a.tobytes() for name, a in built.arrays.items()} == before
        gate.clear()
        records_hang = Failing(reader, lambda: gate.wait(LONG_S), "a.jsonl")
        with pytest.raises(StorageTimeout, match=r"reading the records of pack 0\.0\.1 took"):
            build(spec, reader=records_hang, limits=limits, pool=pools)
        gate.set()
        wait_until(lambda: pools.reads.stuck == 0)


def wait_until(condition) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_decode_over_its_deadline_becomes_a_hole_for_good(data, text, build, monkeypatch) -> None:
    gate, real = threading.Event(), images.decode

    def slow(bytes_, image, *rest):
        if image.member == "tall.jpg":
            gate.wait(LONG_S)
        return real(bytes_, image, *rest)

    spec = data.pack(data.item(3, text), data.item(1, text))
    monkeypatch.setattr(images, "decode", slow)
    with BuildPools(decode_threads=1, read_threads=2) as pools:
        built = build(spec, limits=DecodeLimits(deadline_s=0.3), pool=pools)
        key = f"{spec.items[0].key}#0"
        assert built.new_holes == {key: "decode took longer than 0.3 s"}
        assert (pools.decodes.abandoned, pools.decodes.stuck) == (1, 1)
        before = {name: a.tobytes() for name, a in built.arrays.items()}
        gate.set()
        wait_until(lambda: pools.decodes.stuck == 0)
        assert {name: a.tobytes() for name, a in built.arrays.items()} == before
    assert_hole(built, spec, 0, 0)
    monkeypatch.setattr(images, "decode", real)
    assert same_arrays(build(spec, holes=built.new_holes), built)


def test_a_picture_above_the_limit_of_bytes_is_not_read(data, text, build) -> None:
    spec = data.pack(data.item(3, text))
    image = spec.items[0].images[0]
    limit = max(image.stored_bytes, image.size_bytes) - 1
    built = build(spec, limits=DecodeLimits(max_bytes=limit))
    assert built.new_holes[f"{spec.items[0].key}#0"].startswith("too large: a file of")


def test_largest_pictures_are_decoded_first(data, text, build, monkeypatch) -> None:
    order, real = [], images.decode

    def watched(bytes_, image, *rest):
        order.append(image.member)
        return real(bytes_, image, *rest)

    monkeypatch.setattr(images, "decode", watched)
    with BuildPools(decode_threads=1, read_threads=1) as pools:
        build(data.pack(*(data.item(i, text) for i in (3, 1, 4))), pool=pools)
    assert order == ["large.jpg", "bad.jpg", "tall.jpg", "small.png"]


def test_a_failed_build_takes_its_tasks_back(data, text, build, reader) -> None:
    item = data.item(0, text)
    broken = dataclasses.replace(item, total_tokens=99, stop=99)
    gate = threading.Event()
    slow = Failing(reader, lambda: gate.wait(LONG_S))
    with BuildPools(decode_threads=1, read_threads=2) as pools:
        spec = data.pack(broken, data.item(3, text), *(data.item(i, text) for i in (1, 5)))
        threading.Timer(0.1, gate.set).start()
        with pytest.raises(StaleIndexError):
            build(spec, reader=slow, pool=pools)
        wait_until(lambda: not pools.reads._queue and not pools.reads._running)
        assert not pools.decodes._queue


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_tokens": 99, "stop": 99}, "tokens, the index 99"),
        ({"images": (), "kept_images": 0}, "the record has 1 images, the index 0"),
        ({"layout": "messages"}, "the record cannot be read: field 'messages' is missing"),
    ],
    ids="tokens images layout".split(),
)
def test_a_record_that_is_not_the_indexed_one(data, text, build, change, message) -> None:
    item = dataclasses.replace(data.item(3, text), **change)
    with pytest.raises(StaleIndexError, match=message) as caught:
        build(data.pack(item))
    assert item.key in str(caught.value) and "dataservice index" in str(caught.value)


@pytest.mark.parametrize("shard", [0, 1], ids=["records", "pictures"])
def test_a_damaged_staged_copy_is_no_hole(data, text, build, tmp_path, shard) -> None:
    ref = data.shards[shard]
    copy = Path(staged_path(str(tmp_path), ref))
    copy.write_bytes(bytes(b ^ 255 for b in Path(ref.url).read_bytes()))
    spec = data.pack(data.item(3, text))
    with ShardReader(str(tmp_path), deadline_s=LONG_S, retries=0) as reader:
        built = build(spec, reader=reader)
    assert built.new_holes == {}
    assert not copy.exists()
    expected = build(spec).arrays
    assert all(np.array_equal(built.arrays[name], expected[name]) for name in expected)


@pytest.mark.parametrize("shard", [0, 1], ids=["records", "pictures"])
def test_a_damaged_copy_that_another_thread_removed_is_no_hole(
    data, text, build, tmp_path, shard
) -> None:
    ref = data.shards[shard]
    copy = Path(staged_path(str(tmp_path), ref))
    copy.write_bytes(bytes(b ^ 255 for b in Path(ref.url).read_bytes()))

    class Slower(ShardReader):
        def read(self, shard, offset, size):
            found = super().read(shard, offset, size)
            copy.unlink(missing_ok=True)
            return found

    with Slower(str(tmp_path), deadline_s=LONG_S, retries=0) as reader:
        assert build(data.pack(data.item(3, text)), reader=reader).new_holes == {}


def test_a_damaged_record_is_a_hole_of_its_sample_alone(data, text, build) -> None:
    whole = build(data.pack(data.item(3, text), data.item(0, text)))
    item = dataclasses.replace(data.item(3, text), crc32=5)
    spec = data.pack(item, data.item(0, text))
    built = build(spec)
    (key,) = built.new_holes
    assert key == f"{item.key}#record"
    assert "damaged record" in built.new_holes[key]
    again = build(spec, holes=built.new_holes)
    assert again.new_holes == {}
    for one in (built, again):
        assert one.meta["holes"] == [f"{key}: {built.new_holes[key]}"]
        assert (one.arrays["labels"][: item.stop] == -100).all()
        for name in ("cu_seqlens", "image_grid_thw", "image_doc_ids", "pixel_values"):
            assert np.array_equal(one.arrays[name], whole.arrays[name])
        ids, whole_ids = one.arrays["input_ids"], whole.arrays["input_ids"]
        assert (ids == text.image_token).sum() == (whole_ids == text.image_token).sum()
        assert np.array_equal(ids[item.stop :], whole_ids[item.stop :])
        assert np.array_equal(
            one.arrays["labels"][item.stop :], whole.arrays["labels"][item.stop :]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 3}, "tokens, said 3"),
        ({"pack_length": 3}, "length 3"),
        ({"num_patches": 3}, "patches, said 3"),
    ],
    ids="tokens length patches".split(),
)
def test_a_spec_that_contradicts_itself(data, text, build, change, message) -> None:
    spec = dataclasses.replace(data.pack(data.item(3, text)), **change)
    with pytest.raises(ValueError, match=message):
        build(spec)


def test_an_item_that_contradicts_itself(data, text, build) -> None:
    item = data.item(3, text)
    end = item.total_tokens
    for change, message in (
        ({"start": 5, "stop": 5}, "has no tokens 5:5"),
        ({"start": 1}, "has images and begins at its token 1"),
        ({"kept_images": 0}, f"keeps 0 of 1 images in its tokens 0:{end} of {end}"),
        ({"kept_images": 2, "stop": end - 1}, "keeps 2 of 1 images in its tokens 0:"),
        ({"stop": 3}, "keeps images of 18 tokens in its first 3"),
    ):
        with pytest.raises(ValueError, match=message):
            build(data.pack(dataclasses.replace(item, **change)))
    odd = dataclasses.replace(item.images[0], target_width=12)
    with pytest.raises(ValueError, match="not in multiples of 8"):
        build(data.pack(dataclasses.replace(item, images=(odd,))))
