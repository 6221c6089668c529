"""Micro-batches: what is derived, what is refused, what is not copied."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dataservice.errors import WireError
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch, check_pack
from trainer_client.testing import FAKE_INFO, FakePack, padding_pack, synthetic_packs

VISION = VisionInfo.of(FAKE_INFO)
TILES = dataclasses.replace(FAKE_INFO, pack_length=256, tile=4, thumbnail=True, tile_tokens=3)
"""Tiles of 4 x 4 pixels, of four patches each."""
META = {"step": 3, "micro_step": 1}


def build(*packs: FakePack) -> MicroBatch:
    return build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta=dict(META),
        is_last_micro_step=True,
        vision=VISION,
    )


def has_padding(pack: FakePack) -> bool:
    return len(pack.arrays["cu_seqlens"]) == pack.meta["num_docs"] + 2


def test_one_pack_token_by_token() -> None:
    pack = next(pack for pack in synthetic_packs(9, image_share=1.0) if has_padding(pack))
    batch = build(pack)
    bounds = pack.arrays["cu_seqlens"].tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        padding = number == pack.meta["num_docs"]
        assert batch["position_ids"][start:stop].tolist() == list(range(stop - start))
        assert set(batch["doc_ids"][start:stop].tolist()) == {-1 if padding else number}
    assert batch["input_ids"].tolist() == pack.arrays["input_ids"].tolist()
    assert batch["labels"].tolist() == pack.arrays["labels"].tolist()
    assert batch["max_seqlen"] == max(np.diff(bounds))
    assert type(batch["max_seqlen"]) is int
    assert (batch.step, batch.micro_step, batch.is_last_micro_step) == (3, 1, True)
    assert batch.meta["sample_keys"] == [pack.meta["sample_keys"]]


def test_dtypes_and_shapes() -> None:
    packs = synthetic_packs(2, image_share=0.5)
    batch = build(*packs)
    tokens = 2 * FAKE_INFO.pack_length
    images = sum(pack.num_images for pack in packs)
    patches = sum(len(pack.arrays["pixel_values"]) for pack in packs)
    assert images
    expected = {
        "input_ids": (torch.int64, (tokens,)),
        "labels": (torch.int64, (tokens,)),
        "position_ids": (torch.int64, (tokens,)),
        "doc_ids": (torch.int32, (tokens,)),
        "cu_seqlens": (torch.int32, (len(batch["cu_seqlens"]),)),
        "doc_lengths": (torch.int32, (len(batch["cu_seqlens"]) - 1,)),
        "pixel_values": (torch.uint8, (patches, 3 * FAKE_INFO.patch**2)),
        "image_grid_thw": (torch.int64, (images, 3)),
        "image_doc_ids": (torch.int32, (images,)),
    }
    found = {k: (v.dtype, tuple(v.shape)) for k, v in batch.items() if torch.is_tensor(v)}
    assert found == expected
    assert batch.size_bytes == sum(v.nbytes for v in batch.values() if torch.is_tensor(v))


def test_two_packs_are_one_after_the_other() -> None:
    first, second = synthetic_packs(2, image_share=1.0)
    both, one, two = build(first, second), build(first), build(second)
    length, segments = FAKE_INFO.pack_length, len(one["cu_seqlens"]) - 1
    for name in (
        "input_ids",
        "labels",
        "position_ids",
        "doc_lengths",
        "pixel_values",
        "image_grid_thw",
    ):
        assert torch.equal(both[name], torch.cat([one[name], two[name]])), name
    assert torch.equal(
        both["cu_seqlens"], torch.cat([one["cu_seqlens"], two["cu_seqlens"][1:] + length])
    )
    shifted = torch.where(two["doc_ids"] < 0, two["doc_ids"], two["doc_ids"] + segments)
    assert torch.equal(both["doc_ids"], torch.cat([one["doc_ids"], shifted]))
    assert torch.equal(
        both["image_doc_ids"], torch.cat([one["image_doc_ids"], two["image_doc_ids"] + segments])
    )
    # an image's document is where its tokens are
    image_tokens = both["doc_ids"][both["input_ids"] == FAKE_INFO.image_token]
    per_image = both["image_grid_thw"].prod(dim=1) // FAKE_INFO.merge**2
    assert torch.equal(image_tokens, both["image_doc_ids"].repeat_interleave(per_image))


def test_tiles_of_each_image() -> None:
    packs = synthetic_packs(6, image_share=1.0, info=TILES)
    vision = VisionInfo.of(TILES)
    for pack in packs:
        check_pack(pack.arrays, pack.meta, pack_length=TILES.pack_length, vision=vision)
    batch = build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta=dict(META),
        is_last_micro_step=True,
        vision=vision,
    )
    grids = batch["image_grid_thw"].prod(dim=1).tolist()
    assert batch["num_tiles"].tolist() == [n + 1 if n > 1 else 1 for n in grids]
    assert batch["pixel_values"].shape == (sum(batch["num_tiles"]), 3 * 4 * 4)
    assert (batch["input_ids"] == TILES.image_token).sum() == 3 * sum(batch["num_tiles"])
    short = dict(packs[0].arrays, pixel_values=packs[0].arrays["pixel_values"][:-1])
    with pytest.raises(WireError, match="image grids need"):
        check_pack(short, packs[0].meta, pack_length=TILES.pack_length, vision=vision)


@pytest.mark.parametrize("packs_per_cell", [1, 3])
def test_filler_behind_aligned_documents(packs_per_cell: int) -> None:
    info = dataclasses.replace(FAKE_INFO, pack_length=96, align=8)
    packs = synthetic_packs(packs_per_cell, seed=5, image_share=1.0, info=info)
    for pack in packs:
        check_pack(pack.arrays, pack.meta, pack_length=96, vision=VISION, align=8)
    batch = build(*packs)
    sizes = batch["cu_seqlens"].diff()
    assert (batch["cu_seqlens"] % 8 == 0).all()
    assert (sizes > batch["doc_lengths"]).any()
    assert (sizes - batch["doc_lengths"]).max() < 8
    assert batch["doc_lengths"].dtype == torch.int32
    filler = batch["position_ids"] >= batch["doc_lengths"].repeat_interleave(sizes)
    assert set(batch["doc_ids"][filler].tolist()) == {-1}
    assert set(batch["labels"][filler].tolist()) == {-100}
    assert set(batch["input_ids"][filler].tolist()) == {FAKE_INFO.pad_token}
    inside = torch.cat([torch.arange(size) for size in sizes.tolist()])
    assert torch.equal(batch["position_ids"], inside)
    documents = sum(pack.meta["num_docs"] for pack in packs)
    assert len(set(batch["doc_ids"][~filler].tolist()) - {-1}) == documents


def _not_where_the_session_aligns(arrays: dict[str, Any]) -> None:
    arrays["cu_seqlens"][1] += 1


def _label_in_the_filler(arrays: dict[str, Any]) -> None:
    segment = int(np.flatnonzero(np.diff(arrays["cu_seqlens"]) > arrays["doc_lengths"])[0])
    arrays["labels"][arrays["cu_seqlens"][segment + 1] - 1] = 7


def _filler_of_a_whole_unit(arrays: dict[str, Any]) -> None:
    arrays["doc_lengths"][-1] -= 8


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_not_where_the_session_aligns, "not multiples of 8|do not fill"),
        (_label_in_the_filler, "filler behind a document has labels"),
        (_filler_of_a_whole_unit, "do not fill their segments, aligned to 8"),
    ],
)
def test_an_aligned_pack_that_does_not_fit_together_is_refused(damage: Any, words: str) -> None:
    info = dataclasses.replace(FAKE_INFO, pack_length=96, align=8)
    pack = synthetic_packs(1, seed=5, image_share=1.0, info=info)[0]
    limits = {"pack_length": 96, "vision": VISION, "align": 8}
    arrays, meta = dict(pack.arrays), pack.meta | {"pack_id": "0.0.7"}
    check_pack(arrays, meta, **limits)
    damage(arrays)
    with pytest.raises(WireError, match=words):
        check_pack(arrays, meta, **limits)


def test_a_padding_pack_is_one_segment_without_a_document() -> None:
    batch = build(padding_pack())
    assert batch["cu_seqlens"].tolist() == [0, FAKE_INFO.pack_length]
    assert batch["doc_lengths"].tolist() == [FAKE_INFO.pack_length]
    assert set(batch["doc_ids"].tolist()) == {-1}
    assert set(batch["labels"].tolist()) == {-100}
    assert batch["pixel_values"].shape == (0, 3 * FAKE_INFO.patch**2)
    assert batch["image_grid_thw"].shape == (0, 3)


def test_pixels_of_one_pack_are_not_copied() -> None:
    pack = synthetic_packs(1, image_share=1.0)[0]
    batch = build(pack)
    assert batch["pixel_values"].data_ptr() == pack.arrays["pixel_values"].ctypes.data


def test_a_copy_keeps_meta() -> None:
    batch = copy.copy(build(padding_pack()))
    assert batch.meta["step"] == 3
    assert batch.vision == VISION


def _without_image_docs(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    del arrays["image_doc_ids"]


def _wrong_dtype(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["labels"] = arrays["labels"].astype(np.int64)


def _too_long(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["input_ids"] = np.append(arrays["input_ids"], np.int32(0))


def _gap(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["cu_seqlens"] = arrays["cu_seqlens"][:-1]


def _empty_segment(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["cu_seqlens"][1] = 0


def _segment_without_length(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["doc_lengths"] = arrays["doc_lengths"][:-1]


def _filler_where_nothing_is_aligned(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["doc_lengths"][0] -= 1


def _longer_than_its_segment(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["doc_lengths"][0] += 1


def _fewer_docs(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["num_docs"] -= 1


def _fewer_patches(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["pixel_values"] = arrays["pixel_values"][:-1]


def _lost_image(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["image_doc_ids"] = arrays["image_doc_ids"][:-1]


def _image_in_the_padding(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    arrays["image_doc_ids"][-1] = meta["num_docs"]


@pytest.mark.parametrize(
    "damage",
    [
        _without_image_docs,
        _wrong_dtype,
        _too_long,
        _gap,
        _empty_segment,
        _segment_without_length,
        _filler_where_nothing_is_aligned,
        _longer_than_its_segment,
        _fewer_docs,
        _fewer_patches,
        _lost_image,
        _image_in_the_padding,
    ],
)
def test_a_pack_that_does_not_fit_together_is_refused(damage: Any) -> None:
    pack = synthetic_packs(1, image_share=1.0)[0]
    limits = {"pack_length": FAKE_INFO.pack_length, "vision": VISION}
    arrays, meta = dict(pack.arrays), pack.meta | {"pack_id": "0.0.7"}
    check_pack(arrays, meta, **limits)
    damage(arrays, meta)
    with pytest.raises(WireError, match=r"0\.0\.7"):
        check_pack(arrays, meta, **limits)
