"""One row a document, padded on the right: for models that know nothing of packing.

Invariants: documents stand in the order of the pack, so images keep their order; padding of the
pack is left out; every row has a token that is attended to.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from trainer_client.adapters.documents import pixels
from trainer_client.batch import IGNORE, MicroBatch


def padded_inputs(
    batch: MicroBatch,
    *,
    pad_token: int,
    image_token: int | None = None,
    multiple_of: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Rows for a model that takes `input_ids` and `attention_mask`.

        input_ids            int64 [B, L]   filled with `pad_token`
        labels               int64 [B, L]   unshifted, filled with -100
        attention_mask       int64 [B, L]   1 on tokens of documents
        mm_token_type_ids    int32 [B, L]   1 on image tokens; where `image_token` is given
        pixel_values, image_grid_thw        as in the pack, where it has images; of tiles no grid

    B is the number of documents, L the longest, rounded up to `multiple_of`. A micro-batch without
    a document gives one row of one pad token without a label. Costs B * L / T of the packed
    form's compute; waits for the device.
    """
    rows = _rows(batch)
    ids = [batch["input_ids"][row] for row in rows] or [batch["input_ids"].new_tensor([pad_token])]
    labels = [batch["labels"][row] for row in rows] or [batch["labels"].new_tensor([IGNORE])]
    longest = max(len(row) for row in ids)
    width = -(-longest // multiple_of) * multiple_of

    def stack(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        padded = pad_sequence(values, batch_first=True, padding_value=fill)
        return torch.nn.functional.pad(padded, (0, width - longest), value=fill)

    made = {
        "input_ids": stack(ids, pad_token),
        "labels": stack(labels, IGNORE),
        "attention_mask": stack([torch.ones_like(row) for row in ids], 0),
    }
    if image_token is not None:
        made["mm_token_type_ids"] = (made["input_ids"] == image_token).int()
    if len(batch["image_grid_thw"]):
        made["pixel_values"] = pixels(batch, dtype)
        if not batch.vision.tile:
            made["image_grid_thw"] = batch["image_grid_thw"]
    return made


def _rows(batch: MicroBatch) -> list[slice]:
    """Where the documents stand, without the filler behind them."""
    bounds = batch["cu_seqlens"].tolist()
    names = batch["doc_ids"].tolist()
    lengths = batch["doc_lengths"].tolist()
    return [
        slice(start, start + length)
        for start, length in zip(bounds[:-1], lengths, strict=True)
        if names[start] >= 0
    ]
