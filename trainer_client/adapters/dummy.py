"""A small picture for text-only micro-batches, so that every rank runs the vision tower.

Invariants: no document changes, the dummy stands in a segment of padding whose labels are -100, so
loss and gradients stay as they are, and the vision tower's gradients are zeros, not None.
"""

from __future__ import annotations

import torch

from dataservice.wire.messages import SessionOpened
from trainer_client.batch import IGNORE, MicroBatch


def with_dummy_image(batch: MicroBatch, info: SessionOpened) -> MicroBatch:
    """The micro-batch itself where it has images, else a copy with one black square or tile.

    FSDP, expert and tensor parallelism meet in collectives inside the vision tower: a rank whose
    micro-batch has no image would leave the others waiting (`meta["ranks_without_images"]` says
    how many there are). The dummy's tokens (one of `merge` x `merge` patches; `tile_tokens`) take
    the place of padding. Where no segment of padding is long enough they are appended as one of
    their own, aligned to `info.align`, and T grows by that. `info`: of `PackStream.open()`.
    Waits for the device where the batch is text-only and on one.
    """
    if len(batch["image_grid_thw"]):
        return batch
    vision = batch.vision
    grid = (1, 1, 1) if vision.tile else (1, vision.merge, vision.merge)
    grids = torch.tensor([grid], dtype=torch.int32)
    num_tokens = int(vision.image_tokens(grids.numpy())[0])
    padded = MicroBatch(batch)
    padded.__dict__.update(batch.__dict__)
    segment, start = _room(batch, num_tokens)
    if segment < 0:
        segment, start = len(batch["cu_seqlens"]) - 1, len(batch["input_ids"])
        _append_padding(padded, -(-num_tokens // info.align) * info.align, info.pad_token)
    ids = padded["input_ids"].clone()
    ids[start : start + num_tokens] = info.image_token
    rows, values = int(vision.num_rows(grids.numpy())[0]), batch["pixel_values"].shape[1:]
    padded["input_ids"] = ids
    padded["pixel_values"] = batch["pixel_values"].new_zeros((rows, *values))
    padded["image_grid_thw"] = batch["image_grid_thw"].new_tensor([grid])
    padded["image_doc_ids"] = batch["image_doc_ids"].new_tensor([segment])
    if vision.tile:
        padded["num_tiles"] = batch["num_tiles"].new_tensor([rows])
    return padded


def _room(batch: MicroBatch, num_tokens: int) -> tuple[int, int]:
    """(segment, first token) of a padding that is long enough, or (-1, -1)."""
    bounds = batch["cu_seqlens"].long()
    fits = (batch["doc_ids"][bounds[:-1]] < 0) & (bounds.diff() >= num_tokens)
    found = fits.nonzero().flatten().tolist()
    return (found[0], int(bounds[found[0]])) if found else (-1, -1)


def _append_padding(batch: MicroBatch, count: int, pad_token: int) -> None:
    """One more segment of padding, of `count` tokens."""
    lengths, length = batch["doc_lengths"], len(batch["input_ids"])
    ids, bounds = batch["input_ids"], batch["cu_seqlens"]

    def append(name: str, value: int) -> None:
        batch[name] = torch.cat([batch[name], batch[name].new_full((count,), value)])

    append("input_ids", pad_token)
    append("labels", IGNORE)
    append("doc_ids", -1)
    positions = torch.arange(count, device=ids.device)
    batch["position_ids"] = torch.cat([batch["position_ids"], positions])
    batch["cu_seqlens"] = torch.cat([bounds, bounds.new_tensor([length + count])])
    batch["doc_lengths"] = torch.cat([lengths, lengths.new_tensor([count])])
    batch["max_seqlen"] = max(batch["max_seqlen"], count)
