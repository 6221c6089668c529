"""Tiny random models of transformers' classes, in float64, and packs whose tokens they know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.testing import FAKE_INFO, FakePack, padding_pack, synthetic_packs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IMAGE = FAKE_INFO.image_token
INFO = dataclasses.replace(FAKE_INFO, pack_length=96)
TILES = dataclasses.replace(
    FAKE_INFO, pack_length=128, patch=2, tile=8, thumbnail=True, tile_tokens=4
)
"""Tiles of 8 x 8 pixels: 16 patches, 4 tokens."""
TEXT = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 1]},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 263,
    "vision_start_token_id": IMAGE - 2,
    "vision_end_token_id": IMAGE - 1,
    "tie_word_embeddings": False,
}


def micro_batch(*packs: FakePack, info: Any = INFO, loss_tokens: int = 0) -> MicroBatch:
    return build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta={"step": 0, "micro_step": 0, "loss_tokens": loss_tokens},
        is_last_micro_step=True,
        vision=VisionInfo.of(info),
    )


def mixed_batch() -> MicroBatch:
    """Two packs, one of them text only, documents with one and two images, padding."""
    packs = synthetic_packs(2, seed=3, image_share=0.5, info=INFO)
    assert sorted(bool(pack.num_images) for pack in packs) == [False, True]
    return micro_batch(*packs)


def aligned_batch(align: int = 8) -> MicroBatch:
    """A pack with images whose documents take multiples of `align` tokens."""
    info = dataclasses.replace(INFO, align=align)
    batch = micro_batch(*synthetic_packs(1, seed=3, image_share=1.0, info=info))
    assert (batch["doc_lengths"] < batch["cu_seqlens"].diff()).any()
    return batch


def text_batch() -> MicroBatch:
    return micro_batch(*synthetic_packs(1, seed=4, image_share=0, info=INFO))


def empty_batch() -> MicroBatch:
    return micro_batch(padding_pack(INFO))


def documents(batch: MicroBatch) -> Iterator[tuple[slice, Tensor]]:
    """(tokens of a document, numbers of its images)."""
    starts, lengths = batch["cu_seqlens"].tolist(), batch["doc_lengths"].tolist()
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        if batch["doc_ids"][start] >= 0:
            yield (
                slice(start, start + length),
                (batch["image_doc_ids"] == number).nonzero().flatten(),
            )


def qwen2_5_vl(attention: str = "sdpa") -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": INFO.patch,
            "spatial_merge_size": INFO.merge,
            "temporal_patch_size": INFO.temporal_patch,
            "window_size": 2 * INFO.merge * INFO.patch,
            "fullatt_block_indexes": [1],
        },
        **TOKENS,
    )
    return _model(transformers.Qwen2_5_VLForConditionalGeneration, config, attention)


def qwen3_vl(attention: str = "sdpa") -> Any:
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": INFO.patch,
            "spatial_merge_size": INFO.merge,
            "temporal_patch_size": INFO.temporal_patch,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **TOKENS,
    )
    return _model(transformers.Qwen3VLForConditionalGeneration, config, attention)


def internvl(attention: str = "sdpa") -> Any:
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2"}
        | TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [TILES.tile, TILES.tile],
            "patch_size": [TILES.patch, TILES.patch],
        },
        image_token_id=IMAGE,
        image_seq_length=TILES.tile_tokens,
        tie_word_embeddings=False,
    )
    return _model(transformers.InternVLForConditionalGeneration, config, attention)


def _model(kind: Any, config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = attention
    model = kind._from_config(config, attn_implementation=attention).double().train()
    with torch.no_grad():  # the usual start is so small that attention hardly matters
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """In the dtype of the logits (transformers' own loss is in float32); labels unshifted."""
    return functional.cross_entropy(
        logits.flatten(0, 1)[:-1], labels.flatten()[1:], ignore_index=-100, reduction="sum"
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """By name, zeros where a parameter took no part; the model's are cleared."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def assert_same_gradients(
    got: dict[str, Tensor], expected: dict[str, Tensor], *, share: float = 1e-10
) -> None:
    """To within `share` of the largest."""
    assert got.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=share * largest, msg=name)
