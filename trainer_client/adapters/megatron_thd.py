"""Megatron-Core's packed (THD) form: PackedSeqParams, and the batch its training loops read.

Invariants: `cu_seqlens_*` count real tokens, `cu_seqlens_*_padded` are where documents stand;
labels are shifted already, so token t's label is what it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn import functional

from trainer_client.adapters.documents import is_filler, pixels, shifted_labels
from trainer_client.adapters.qwen_vl import mrope_positions
from trainer_client.batch import IGNORE, MicroBatch


@dataclass(kw_only=True)
class VisualInputs:
    """Megatron-Bridge's `visual_inputs`, by its protocol: tensors by name, moved by their owner."""

    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """What there is, as keyword arguments of the model."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def packed_seq_params(
    batch: MicroBatch, *, align: int = 1, physical: bool = False
) -> PackedSeqParams:
    """Where documents begin and end, for TransformerEngine's THD attention and RoPE.

    `align`: of `PackStream.open()`. With 1, documents stand side by side and the padded bounds are
    None. Otherwise `cu_seqlens_q` and `_kv` are the real lengths cumulated, and the padded ones
    the bounds with the filler. `physical` gives the padded bounds in both places, for the versions
    of TransformerEngine that get gaps between documents wrong: the filler is then attended to by
    nobody but itself, as it comes last. `max_seqlen_*`: the longest document with its filler.
    """
    bounds = batch["cu_seqlens"]
    real = bounds
    if align > 1 and not physical:
        real = functional.pad(batch["doc_lengths"].cumsum(0, dtype=torch.int32), (1, 0))
    padded = bounds if align > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=batch["max_seqlen"],
        max_seqlen_kv=batch["max_seqlen"],
    )


def thd_batch(
    batch: MicroBatch,
    *,
    align: int = 1,
    image_token: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """The dict that a Megatron training loop takes from its data iterator.

    tokens, input_ids      int64 [1, T]    the same tensor under both names
    labels                 int64 [1, T]    of the next token; -100 where there is no loss
    loss_mask              float32 [1, T]  0 where there is no loss
    position_ids           int64 [1, T]    from 0 in every document, going on through filler;
                                           with `image_token` M-RoPE, int64 [3, 1, T]
    padding_mask           bool [1, T]     True on padding, for MoE's router
    attention_mask         None
    cu_seqlens_q, _kv, cu_seqlens_q_padded, _kv_padded (where `align` is above 1), int32 [D+1]
    max_seqlen_q, _kv      int32 []
    total_tokens           int
    visual_inputs          VisualInputs of `dtype` pixels and their grid; absent without images
    """
    labels = shifted_labels(batch)
    positions = batch["position_ids"].unsqueeze(0)
    if image_token is not None:
        positions = mrope_positions(batch, image_token=image_token).unsqueeze(1)
    longest = torch.tensor(batch["max_seqlen"], dtype=torch.int32)
    params = packed_seq_params(batch, align=align)
    tokens = batch["input_ids"].unsqueeze(0)
    made: dict[str, Any] = {
        "tokens": tokens,
        "input_ids": tokens,
        "labels": labels.unsqueeze(0),
        "loss_mask": (labels != IGNORE).float().unsqueeze(0),
        "position_ids": positions,
        "padding_mask": is_filler(batch).unsqueeze(0),
        "attention_mask": None,
        "cu_seqlens_q": params.cu_seqlens_q,
        "cu_seqlens_kv": params.cu_seqlens_kv,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": len(labels),
    }
    if align > 1:
        made["cu_seqlens_q_padded"] = params.cu_seqlens_q_padded
        made["cu_seqlens_kv_padded"] = params.cu_seqlens_kv_padded
    if len(batch["image_grid_thw"]):
        made["visual_inputs"] = VisualInputs(
            pixel_values=pixels(batch, dtype), image_grid_thw=batch["image_grid_thw"]
        )
    return made
