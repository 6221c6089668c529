"""InternVL of tiles: the packed batch of its own training code, and transformers' form.

Invariants: every micro-batch has at least one tile, so the vision model always runs; a tile that is
made up has flag 0 and no token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from dataservice.errors import ConfigError
from trainer_client.adapters.documents import pixels, require
from trainer_client.batch import IGNORE, MicroBatch

LossReduction = Literal["token", "sample", "square"]
_EXPONENT = {"token": 0.0, "sample": 1.0, "square": 0.5}


def internvl_chat_inputs(
    batch: MicroBatch,
    *,
    num_tiles: int = 1,
    loss_reduction: LossReduction = "square",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """What `packed_collate_fn` of InternVL's training code gives its patched model.

        input_ids, labels, position_ids   int64 [1, L]
        attention_mask      int32 [1, D + 1]  cumulative lengths, the last is L
        pixel_values        `dtype` [tiles, 3, side, side]
        image_flags         int64 [tiles]     1 real, 0 made up
        loss_weight         [1][L] floats     a list, so that no cast to bfloat16 touches it
        loss_reduction_all_gather   False
        statistics          int64 [3]         documents, tokens of padding, made-up tiles

    Black tiles fill up to `num_tiles` (as `num_images_expected` with `strict_mode`): one number for
    every rank gives the vision model one shape; ConfigError where a micro-batch has more. A token's
    weight is `1 / n ** e`, n the labels of its document, e by `loss_reduction`.
    Waits for the device.
    """
    require(batch, tiles=True, form="InternVL")
    real = len(batch["pixel_values"])
    values = pixels(batch, dtype)
    missing = max(num_tiles, 1) - real
    if num_tiles > 1 and missing < 0:
        raise ConfigError(
            f"num_tiles is {num_tiles}, this micro-batch has {real}; raise num_tiles, or bound "
            "tiles by plan.patch_cap or fewer packs per cell"
        )
    filler = values.new_zeros((max(missing, 0), *values.shape[1:]))
    flags = batch["image_grid_thw"].new_zeros(real + len(filler))
    flags[:real] = 1
    starts = batch["cu_seqlens"][:-1].long()
    num_docs = int((batch["doc_ids"][starts] >= 0).sum())
    num_padding = int((batch["doc_ids"] < 0).sum())
    return {
        "input_ids": batch["input_ids"].unsqueeze(0),
        "labels": batch["labels"].unsqueeze(0),
        "position_ids": batch["position_ids"].unsqueeze(0),
        "attention_mask": batch["cu_seqlens"].unsqueeze(0),
        "pixel_values": torch.cat([values, filler]),
        "image_flags": flags,
        "loss_weight": [_loss_weight(batch, _EXPONENT[loss_reduction]).tolist()],
        "loss_reduction_all_gather": False,
        "statistics": torch.tensor([num_docs, num_padding, len(filler)]),
    }


def internvl_inputs(batch: MicroBatch, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keyword arguments of transformers' InternVLForConditionalGeneration.

    As `qwen_vl_inputs`, but `position_ids` int64 [1, T] and `pixel_values` [tiles, 3, side, side];
    without images there are none, see `with_dummy_image`.
    """
    require(batch, tiles=True, form="InternVL")
    made = {name: batch[name].unsqueeze(0) for name in ("input_ids", "labels", "position_ids")}
    if len(batch["pixel_values"]):
        made["pixel_values"] = pixels(batch, dtype)
    return made | {
        "cu_seq_lens_q": batch["cu_seqlens"],
        "cu_seq_lens_k": batch["cu_seqlens"],
        "max_length_q": batch["max_seqlen"],
        "max_length_k": batch["max_seqlen"],
        "use_cache": False,
    }


def _loss_weight(batch: MicroBatch, exponent: float) -> torch.Tensor:
    """float32 [T]: weight of each label, 0 where there is none."""
    bounds = batch["cu_seqlens"].long()
    has_label = batch["labels"] != IGNORE
    segment = torch.searchsorted(
        bounds, torch.arange(len(has_label), device=bounds.device), right=True
    )
    counts = has_label.new_zeros(len(bounds), dtype=torch.float32)
    counts.index_add_(0, segment, has_label.float())
    return torch.where(has_label, counts[segment].clamp(min=1) ** -exponent, 0.0)
