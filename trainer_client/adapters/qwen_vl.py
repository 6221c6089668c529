"""Qwen2.5-VL and Qwen3-VL of transformers, and Qwen's own finetuning code: packed inputs.

Invariants: attention stays inside a document, by `position_ids` and by `cu_seq_lens_*` alike;
positions are those of transformers' `get_rope_index` on each document by itself; the first label
of a document is -100; positions are made without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from dataservice.errors import WireError
from trainer_client.adapters.documents import pixels, require
from trainer_client.batch import MicroBatch


def mrope_positions(batch: MicroBatch, *, image_token: int) -> torch.Tensor:
    """int64 [3, T]: time, row and column of every token, from 0 in every document.

    Text advances all three by one. An image's tokens are numbered by their place in its merged
    grid, and the text behind it goes on after the longer of its sides. `image_token`: of
    `PackStream.open()`. On the CPU, WireError where the tokens do not match the grids.
    """
    ids, grid, merge = batch["input_ids"], batch["image_grid_thw"], batch.vision.merge
    is_image = ids == image_token
    if not is_image.is_cuda and int(is_image.sum()) != int(grid.prod(dim=1).sum()) // merge**2:
        raise WireError(
            f"{int(is_image.sum())} tokens are {image_token}, the image grids need "
            f"{int(grid.prod(dim=1).sum()) // merge**2}; pass the image_token of the session"
        )
    advance = torch.ones_like(ids)
    place = ids.new_zeros((3, len(ids)))
    if len(grid):
        frames, height, width = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
        ends = (frames * height * width).cumsum(0)
        number = (is_image.cumsum(0) - 1).clamp(min=0)
        image = torch.searchsorted(ends, number, right=True).clamp(max=len(grid) - 1)
        left = ends[image] - number
        nth = (frames * height * width)[image] - left
        columns, area = width[image], (height * width)[image]
        place = torch.stack([nth // area, nth % area // columns, nth % columns]) * is_image
        side = torch.maximum(height, width)[image]
        advance = torch.where(is_image, torch.where(left == 1, side, 0), advance)
    before = advance.cumsum(0) - advance
    starts = torch.arange(len(ids), device=ids.device) - batch["position_ids"]
    return before - before[starts] + place


def qwen_vl_inputs(
    batch: MicroBatch, *, image_token: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Keyword arguments of Qwen2_5_VLForConditionalGeneration and Qwen3VLForConditionalGeneration.

        input_ids, labels      int64 [1, T]     labels unshifted: the model shifts
        position_ids           int64 [4, 1, T]  from 0 in every document; row 0 counts tokens and
                                                isolates documents, rows 1-3 are M-RoPE
        cu_seq_lens_q, _k      int32 [D + 1]    the same boundaries for FlashAttention
        max_length_q, _k       int
        pixel_values           `dtype` [P, 3 * temporal_patch * patch * patch]
        image_grid_thw         int64 [N, 3]
        use_cache              False

    There is no attention_mask: with one, and with a cache (the models' default even in training),
    transformers does not look for documents and lets them attend to each other. Without images
    both image arguments are left out; `with_dummy_image` puts one in.

    The model's own loss is the mean over this micro-batch. For the step's mean add
    `num_items_in_batch=batch.meta["loss_tokens"] / dp_size` (gradients averaged over ranks).
    """
    require(batch, tiles=False, form="Qwen-VL")
    positions = torch.cat(
        [batch["position_ids"].unsqueeze(0), mrope_positions(batch, image_token=image_token)]
    )
    return _tokens(batch) | {
        "position_ids": positions.unsqueeze(1),
        "cu_seq_lens_q": batch["cu_seqlens"],
        "cu_seq_lens_k": batch["cu_seqlens"],
        "max_length_q": batch["max_seqlen"],
        "max_length_k": batch["max_seqlen"],
        "use_cache": False,
        **_images(batch, dtype),
    }


def qwen_finetune_inputs(
    batch: MicroBatch, *, image_token: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What the data collator of Qwen's finetuning code (`--data_flatten`) gives its patched models.

    `attention_mask` int32 [D + 1] holds cumulative lengths, `position_ids` is int64 [3, 1, T];
    the rest is as in `qwen_vl_inputs`.
    """
    require(batch, tiles=False, form="Qwen-VL")
    return _tokens(batch) | {
        "attention_mask": batch["cu_seqlens"],
        "position_ids": mrope_positions(batch, image_token=image_token).unsqueeze(1),
        **_images(batch, dtype),
    }


def _tokens(batch: MicroBatch) -> dict[str, torch.Tensor]:
    return {name: batch[name].unsqueeze(0) for name in ("input_ids", "labels")}


def _images(batch: MicroBatch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    grid = batch["image_grid_thw"]
    return {"pixel_values": pixels(batch, dtype), "image_grid_thw": grid} if len(grid) else {}
