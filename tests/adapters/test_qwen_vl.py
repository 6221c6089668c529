"""Packed inputs against transformers' own Qwen2.5-VL and Qwen3-VL, one document at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import (
    IMAGE,
    INFO,
    aligned_batch,
    assert_same_gradients,
    documents,
    empty_batch,
    gradients,
    loss_sum,
    mixed_batch,
    qwen2_5_vl,
    qwen3_vl,
    text_batch,
)
from torch import Tensor

from dataservice.errors import WireError
from trainer_client import PackStream, ParallelLayout
from trainer_client.adapters.dummy import with_dummy_image
from trainer_client.adapters.qwen_vl import (
    mrope_positions,
    qwen_finetune_inputs,
    qwen_vl_inputs,
)
from trainer_client.batch import MicroBatch
from trainer_client.device import normalize
from trainer_client.testing import FakeService, synthetic_packs

CLASSES = {"qwen2.5-vl": qwen2_5_vl, "qwen3-vl": qwen3_vl}
BATCHES = {"mixed": mixed_batch, "text only": text_batch, "aligned": aligned_batch}


@pytest.fixture(params=CLASSES)
def build(request: pytest.FixtureRequest) -> Any:
    return CLASSES[request.param]


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest) -> MicroBatch:
    return BATCHES[request.param]()


def inputs_of(batch: MicroBatch) -> dict[str, Any]:
    return qwen_vl_inputs(batch, image_token=IMAGE, dtype=torch.float64)


def of_one_document(batch: MicroBatch, tokens: slice, images: Tensor) -> dict[str, Any]:
    """As the model's processor gives it: nothing about positions."""
    ids = batch["input_ids"][tokens].unsqueeze(0)
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    if len(images):
        rows = torch.cat([batch["image_grid_thw"].new_zeros(1), batch["image_grid_thw"].prod(1)])
        bounds = rows.cumsum(0)
        pixels = normalize(batch, torch.float64)
        inputs["image_grid_thw"] = batch["image_grid_thw"][images]
        inputs["pixel_values"] = torch.cat([pixels[bounds[i] : bounds[i + 1]] for i in images])
    return inputs


def test_positions_are_those_of_get_rope_index(build: Any, batch: MicroBatch) -> None:
    model, positions = build().model, mrope_positions(batch, image_token=IMAGE)
    assert positions.dtype == torch.int64
    for tokens, images in documents(batch):
        one = of_one_document(batch, tokens, images)
        expected, _ = model.get_rope_index(
            one["input_ids"], one["mm_token_type_ids"], one.get("image_grid_thw")
        )
        assert torch.equal(positions[:, tokens], expected.squeeze(1))


def test_positions_of_adjacent_and_long_images() -> None:
    batch = text_batch()
    ids = batch["input_ids"].clone()
    ids[3:11] = IMAGE
    batch["input_ids"] = ids
    batch["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 6], [2, 4, 2]])
    positions = mrope_positions(batch, image_token=IMAGE)
    assert positions[:, 2:12].T.tolist() == [
        [2, 2, 2],
        [3, 3, 3],
        [4, 4, 4],
        [4, 4, 5],
        [4, 4, 6],
        [7, 7, 7],
        [7, 8, 7],
        [8, 7, 7],
        [8, 8, 7],
        [9, 9, 9],
    ]


def test_a_wrong_image_token_is_refused() -> None:
    with pytest.raises(WireError, match="image_token"):
        mrope_positions(mixed_batch(), image_token=IMAGE - 1)


def test_packed_loss_is_the_mean_of_separate_losses(build: Any, batch: MicroBatch) -> None:
    model = build()
    inputs = inputs_of(batch)
    output = model(**inputs)
    num_labels = int((batch["labels"] != -100).sum())
    separate: list[Tensor] = []
    for tokens, images in documents(batch):
        logits = model(**of_one_document(batch, tokens, images)).logits
        torch.testing.assert_close(output.logits[:, tokens], logits, rtol=0, atol=1e-11)
        separate.append(loss_sum(logits, batch["labels"][tokens]))
    assert len(separate) > 1
    packed, mean = (
        loss_sum(output.logits, inputs["labels"]) / num_labels,
        sum(separate) / num_labels,
    )
    torch.testing.assert_close(packed, mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(output.loss.double(), mean, rtol=1e-6, atol=0)
    got, expected = gradients(model, packed), gradients(model, mean)
    assert_same_gradients(got, expected)


def test_documents_are_apart_in_eager_attention_too(build: Any, batch: MicroBatch) -> None:
    logits = build("eager")(**inputs_of(batch)).logits
    torch.testing.assert_close(logits, build()(**inputs_of(batch)).logits, rtol=0, atol=1e-4)


def test_the_mean_of_the_step(build: Any) -> None:
    batch, model = mixed_batch(), build()
    own = int((batch["labels"] != -100).sum())
    mean = model(**inputs_of(batch)).loss
    part = model(**inputs_of(batch), num_items_in_batch=4 * own).loss
    torch.testing.assert_close(part * 4, mean, rtol=1e-6, atol=0)


def test_a_cache_would_let_documents_attend_to_each_other(build: Any) -> None:
    batch, model = mixed_batch(), build()
    alone = model(**inputs_of(batch)).logits
    with_cache = model(**inputs_of(batch) | {"use_cache": True}).logits
    assert (alone - with_cache).abs().max() > 1e-3


def test_boundaries_and_dtypes(batch: MicroBatch) -> None:
    inputs = inputs_of(batch)
    length = len(batch["input_ids"])
    assert inputs["position_ids"].shape == (4, 1, length)
    assert torch.equal(inputs["position_ids"][0, 0], batch["position_ids"])
    assert inputs["cu_seq_lens_q"].dtype == inputs["cu_seq_lens_k"].dtype == torch.int32
    assert int(inputs["cu_seq_lens_q"][-1]) == length
    assert type(inputs["max_length_q"]) is type(inputs["max_length_k"]) is int
    assert "attention_mask" not in inputs
    starts = batch["cu_seqlens"][:-1].long()
    assert set(inputs["labels"][0, starts].tolist()) == {-100}
    assert (
        ("pixel_values" in inputs)
        == ("image_grid_thw" in inputs)
        == (len(starts) > 0) & bool(len(batch["image_grid_thw"]))
    )


def test_pixels_normalised_before_are_taken_as_they_are() -> None:
    batch = mixed_batch()
    expected = qwen_vl_inputs(batch, image_token=IMAGE)["pixel_values"]
    batch["pixel_values"] = normalize(batch)
    assert torch.equal(qwen_vl_inputs(batch, image_token=IMAGE)["pixel_values"], expected)


def test_a_micro_batch_without_a_document(build: Any) -> None:
    inputs = inputs_of(empty_batch())
    loss = loss_sum(build()(**inputs).logits, inputs["labels"])
    assert loss == 0


def test_training_on_a_stream(build: Any) -> None:
    """As in the README: two steps of two micro-steps, some of them text only."""
    model, dp_size, tower = build(), 1, []
    model.model.visual.register_forward_hook(lambda *_: tower.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    packs = synthetic_packs(4, seed=5, image_share=0.5, info=INFO)
    step_losses: list[float] = []
    with FakeService(packs, info=INFO) as service:
        stream = PackStream(
            service.endpoint, job="qwen", layout=ParallelLayout.data_parallel(0, 1), micro_steps=2
        )
        with stream:
            info, loss_of_step = stream.open(), 0.0
            for batch in stream:
                batch = with_dummy_image(batch, info)
                inputs = qwen_vl_inputs(batch, image_token=info.image_token)
                labels = batch.meta["loss_tokens"] / dp_size
                loss = model(**inputs, num_items_in_batch=labels).loss
                loss.backward()
                loss_of_step += loss.item()
                if batch.is_last_micro_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    step_losses.append(loss_of_step)
                    loss_of_step = 0.0
    assert len(tower) == 4 and len(step_losses) == 2
    assert all(0 < loss < 20 for loss in step_losses)


def test_the_form_of_qwens_finetuning_code(build: Any) -> None:
    batch, model = mixed_batch(), build()
    packed = model(**inputs_of(batch)).logits
    inputs = qwen_finetune_inputs(batch, image_token=IMAGE, dtype=torch.float64)
    bounds = inputs.pop("attention_mask")
    assert bounds.dtype == torch.int32
    # its attention is varlen over these bounds; here as a mask
    segment = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
    allowed = (segment[:, None] == segment[None]).tril()
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    logits = model(**inputs, attention_mask=mask[None, None], use_cache=False).logits
    torch.testing.assert_close(logits, packed, rtol=0, atol=1e-11)
