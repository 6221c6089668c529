"""InternVL's packed batch, read as its training code reads it, and transformers' InternVL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tiny_models import (
    IMAGE,
    TILES,
    assert_same_gradients,
    documents,
    gradients,
    internvl,
    loss_sum,
    micro_batch,
    text_batch,
)
from torch import Tensor

from dataservice.errors import ConfigError
from trainer_client.adapters.internvl import internvl_chat_inputs, internvl_inputs
from trainer_client.adapters.qwen_vl import qwen_vl_inputs
from trainer_client.batch import MicroBatch
from trainer_client.device import normalize
from trainer_client.testing import synthetic_packs


def tiles_batch(image_share: float = 0.5) -> MicroBatch:
    packs = synthetic_packs(2, seed=8, image_share=image_share, info=TILES)
    return micro_batch(*packs, info=TILES)


def separately(model: Any, batch: MicroBatch) -> list[Tensor]:
    """Logits of each document by itself, as transformers' processor would give it."""
    pixels = normalize(batch, torch.float64)
    rows = torch.cat([batch["num_tiles"].new_zeros(1), batch["num_tiles"].cumsum(0)])
    logits = []
    for tokens, images in documents(batch):
        inputs = {"input_ids": batch["input_ids"][tokens].unsqueeze(0)}
        if len(images):
            inputs["pixel_values"] = torch.cat([pixels[rows[i] : rows[i + 1]] for i in images])
        logits.append(model(**inputs).logits)
    return logits


@pytest.mark.parametrize("image_share", [0.5, 0.0])
def test_transformers_form(image_share: float) -> None:
    model, batch = internvl(), tiles_batch(image_share)
    inputs = internvl_inputs(batch, dtype=torch.float64)
    assert ("pixel_values" in inputs) == (image_share > 0)
    packed = loss_sum(model(**inputs).logits, inputs["labels"])
    one_by_one = [
        loss_sum(logits, batch["labels"][tokens])
        for logits, (tokens, _) in zip(separately(model, batch), documents(batch), strict=True)
    ]
    assert len(one_by_one) > 1
    torch.testing.assert_close(packed, sum(one_by_one), rtol=1e-12, atol=0)
    assert_same_gradients(gradients(model, packed), gradients(model, sum(one_by_one)))


def chat_logits(model: Any, made: dict[str, Any]) -> Tensor:
    """As InternVL's model reads the batch; its attention is varlen over `attention_mask`."""
    ids, bounds = made["input_ids"], made["attention_mask"].squeeze(0)
    embeds = model.get_input_embeddings()(ids).clone().flatten(0, 1)
    features = model.get_image_features(pixel_values=made["pixel_values"]).pooler_output
    features = features[made["image_flags"] == 1].reshape(-1, embeds.shape[1])
    selected = ids.flatten() == IMAGE
    embeds[selected] = embeds[selected] * 0.0 + features
    segment = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
    allowed = (segment[:, None] == segment[None]).tril()
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    return model(
        inputs_embeds=embeds.unsqueeze(0),
        attention_mask=mask[None, None],
        position_ids=made["position_ids"],
        use_cache=False,
    ).logits


@pytest.mark.parametrize("num_tiles", [1, 40])
def test_chat_form_gives_the_same_logits(num_tiles: int) -> None:
    model, batch = internvl(), tiles_batch()
    made = internvl_chat_inputs(batch, num_tiles=num_tiles, dtype=torch.float64)
    real = int(batch["num_tiles"].sum())
    assert made["image_flags"].shape == made["pixel_values"].shape[:1] == (max(num_tiles, real),)
    assert made["image_flags"].sum() == real
    logits = chat_logits(model, made)
    for own, (tokens, _) in zip(separately(model, batch), documents(batch), strict=True):
        torch.testing.assert_close(logits[:, tokens], own, rtol=0, atol=1e-11)
    length = len(batch["input_ids"])
    assert made["attention_mask"].dtype == torch.int32
    assert made["attention_mask"].shape == (1, len(batch["cu_seqlens"]))
    assert made["attention_mask"][0, -1] == length
    num_docs = len(list(documents(batch)))
    assert made["statistics"].tolist() == [
        num_docs,
        int((batch["doc_ids"] < 0).sum()),
        len(made["image_flags"]) - real,
    ]


def test_a_text_only_pack_runs_the_vision_model_on_a_black_tile() -> None:
    model, batch = internvl(), tiles_batch(0.0)
    made = internvl_chat_inputs(batch, dtype=torch.float64)
    assert made["image_flags"].tolist() == [0]
    assert not made["pixel_values"].any()
    model.zero_grad()
    loss_sum(chat_logits(model, made), made["labels"]).backward()
    tower = dict(model.model.vision_tower.named_parameters())
    unused = {name for name, p in tower.items() if p.grad is None}
    assert not {name for name in unused if "mask_token" not in name}
    assert not any(p.grad.any() for p in tower.values() if p.grad is not None)


@pytest.mark.parametrize(("reduction", "power"), [("token", 0), ("sample", 1), ("square", 0.5)])
def test_loss_weights(reduction: Any, power: float) -> None:
    batch = tiles_batch()
    made = internvl_chat_inputs(batch, loss_reduction=reduction)
    (weights,) = made["loss_weight"]
    assert isinstance(weights, list)
    total = 0
    for tokens, _ in documents(batch):
        labels, own = batch["labels"][tokens].tolist(), weights[tokens]
        count = sum(label != -100 for label in labels)
        total += count
        for label, weight in zip(labels, own, strict=True):
            expected = 0.0 if label == -100 else 1 / math.pow(count, power)
            assert weight == pytest.approx(expected, rel=1e-6)
    assert sum(weight > 0 for weight in weights) == total > 0


def test_too_few_tiles_and_the_wrong_mode_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_tiles is 2"):
        internvl_chat_inputs(tiles_batch(), num_tiles=2)
    with pytest.raises(ConfigError, match=r"vision\.mode: tiles"):
        internvl_chat_inputs(text_batch())
    with pytest.raises(ConfigError, match=r"vision\.mode: patches"):
        qwen_vl_inputs(tiles_batch(), image_token=IMAGE)
