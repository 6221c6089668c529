"""A dummy image changes neither loss nor gradients, and lets FSDP's ranks meet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny_models import (
    IMAGE,
    INFO,
    TILES,
    assert_same_gradients,
    empty_batch,
    gradients,
    internvl,
    loss_sum,
    micro_batch,
    mixed_batch,
    qwen2_5_vl,
    qwen3_vl,
    text_batch,
)
from torch.distributed.fsdp import fully_shard

from trainer_client.adapters.dummy import with_dummy_image
from trainer_client.adapters.internvl import internvl_inputs
from trainer_client.adapters.qwen_vl import qwen_vl_inputs
from trainer_client.batch import MicroBatch
from trainer_client.device import normalize
from trainer_client.testing import synthetic_packs

RANKS = 2


def inputs_of(batch: MicroBatch) -> dict[str, Any]:
    return qwen_vl_inputs(batch, image_token=IMAGE, dtype=torch.float64)


def full_text_batch() -> MicroBatch:
    """Without any padding: its last segment is cut off."""
    pack = synthetic_packs(1, seed=4, image_share=0, info=INFO)[0]
    length = int(pack.arrays["cu_seqlens"][pack.meta["num_docs"]])
    cut = {name: pack.arrays[name][:length] for name in ("input_ids", "labels")}
    for name, extra in (("cu_seqlens", 1), ("doc_lengths", 0)):
        cut[name] = pack.arrays[name][: pack.meta["num_docs"] + extra]
    batch = micro_batch(dataclasses.replace(pack, arrays=pack.arrays | cut))
    assert (batch["doc_ids"] >= 0).all()
    return batch


@pytest.mark.parametrize("build", [qwen2_5_vl, qwen3_vl])
@pytest.mark.parametrize("make", [text_batch, full_text_batch, empty_batch])
def test_loss_and_gradients_stay(build: Any, make: Any) -> None:
    model, batch = build(), make()
    dummy = with_dummy_image(batch, INFO)
    before = loss_sum(model(**inputs_of(batch)).logits, batch["labels"])
    expected = gradients(model, before)
    inputs = inputs_of(dummy)
    after = loss_sum(model(**inputs).logits, inputs["labels"])
    got = gradients(model, after)
    torch.testing.assert_close(after, before, rtol=1e-13, atol=0)
    if make is empty_batch:
        assert not any(gradient.any() for gradient in got.values())
    else:
        assert_same_gradients(got, expected)
    vision = [p for name, p in model.named_parameters() if "visual" in name]
    assert vision and all(p.grad is not None and not p.grad.any() for p in vision)


def test_it_takes_the_place_of_padding() -> None:
    batch = text_batch()
    dummy = with_dummy_image(batch, INFO)
    assert len(dummy["input_ids"]) == len(batch["input_ids"])
    changed = dummy["input_ids"] != batch["input_ids"]
    assert changed.sum() == 1 and batch["doc_ids"][changed] == -1
    assert dummy["image_grid_thw"].tolist() == [[1, INFO.merge, INFO.merge]]
    assert dummy["image_doc_ids"].tolist() == [len(batch["cu_seqlens"]) - 2]
    assert dummy.meta is batch.meta
    assert len(batch["image_grid_thw"]) == 0
    assert len(batch["pixel_values"]) == 0


def test_without_padding_it_is_appended_and_aligned() -> None:
    batch = full_text_batch()
    dummy = with_dummy_image(batch, dataclasses.replace(INFO, align=8))
    length = len(batch["input_ids"])
    assert dummy["input_ids"].tolist()[length:] == [IMAGE, *[INFO.pad_token] * 7]
    assert dummy["cu_seqlens"].tolist() == [*batch["cu_seqlens"].tolist(), length + 8]
    assert dummy["doc_lengths"].tolist() == [*batch["doc_lengths"].tolist(), 8]
    assert dummy["position_ids"].tolist()[length:] == list(range(8))
    assert set(dummy["labels"].tolist()[length:]) == {-100}
    assert set(dummy["doc_ids"].tolist()[length:]) == {-1}
    for name, value in batch.items():
        if torch.is_tensor(value):
            assert dummy[name].dtype == value.dtype, name


def test_images_are_left_alone() -> None:
    batch = mixed_batch()
    assert with_dummy_image(batch, INFO) is batch


def test_pixels_normalised_before() -> None:
    batch = text_batch()
    batch["pixel_values"] = normalize(batch)
    dummy = with_dummy_image(batch, INFO)
    assert dummy["pixel_values"].dtype == torch.float32
    assert qwen_vl_inputs(dummy, image_token=IMAGE)["pixel_values"].shape[0] == INFO.merge**2


def test_a_tile() -> None:
    packs = synthetic_packs(1, seed=8, image_share=0, info=TILES)
    batch = micro_batch(*packs, info=TILES)
    dummy, model = with_dummy_image(batch, TILES), internvl()
    assert dummy["num_tiles"].tolist() == [1]
    assert (dummy["input_ids"] == IMAGE).sum() == TILES.tile_tokens
    losses = [
        loss_sum(model(**internvl_inputs(each, dtype=torch.float64)).logits, each["labels"])
        for each in (batch, dummy)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-13, atol=0)


# ---- two ranks ----------------------------------------------------------------------------------


def rank_main(rank: int, _ranks: int, folder: str) -> None:
    batch = [mixed_batch, text_batch][rank]()
    for name, build in (("2.5", qwen2_5_vl), ("3", qwen3_vl)):
        model = build()
        for block in [*model.model.visual.blocks, *model.model.language_model.layers]:
            fully_shard(block)
        fully_shard(model.model.visual)
        fully_shard(model)
        inputs = inputs_of(with_dummy_image(batch, INFO))
        loss_sum(model(**inputs).logits, inputs["labels"]).backward()
        summed = {n: p.grad.full_tensor() * RANKS for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(summed, f"{folder}/{name}.pt")


def test_fsdp_with_one_rank_without_images(tmp_path: Path) -> None:
    run_ranks("adapters.test_dummy:rank_main", RANKS, tmp_path, str(tmp_path))
    for name, build in (("2.5", qwen2_5_vl), ("3", qwen3_vl)):
        model = build()
        losses = [
            loss_sum(model(**inputs_of(batch)).logits, batch["labels"])
            for batch in (mixed_batch(), text_batch())
        ]
        summed = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert_same_gradients(summed, gradients(model, sum(losses)))
