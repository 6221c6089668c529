"""Several packs as one micro-batch, and a pack without a document.

Invariants: segments and images keep their order and their documents; a padding pack has no labels
and no images, so it adds nothing to a loss that is a sum over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataservice.errors import ConfigError
from trainer_client.batch import IGNORE, MicroBatch

NUMBERED = ("doc_ids", "image_doc_ids")
"""Hold segment numbers, which count on from pack to pack."""
LISTED = ("pack_ids", "pack_numbers", "sample_keys", "holes", "digests")
"""Of meta: lists with an element a pack (`holes`: a hole)."""
PADDED = ("input_ids", "labels", "cu_seqlens", "doc_ids")
"""What a pack must have, that padding can be made like it."""


def join(packs: Sequence[MicroBatch]) -> MicroBatch:
    """Canonical packs along the token axis, in order; one pack is returned as it is.

    Tensors without segment numbers are concatenated along their first axis. `step`, `micro_step`
    and `is_last_micro_step` are not set; meta is the first pack's with the lists of all.
    """
    if len(packs) == 1:
        return packs[0]
    first = packs[0]
    names = [set(pack) for pack in packs]
    if any(other != names[0] for other in names) or "cu_seqlens" not in first:
        raise ConfigError(
            "packs_per_cell is more than 1, but the packs are not canonical micro-batches with the "
            f"same keys: {sorted(set.union(*names))}; use packs_per_cell=1"
        )
    joined = MicroBatch()
    segments = [len(pack["cu_seqlens"]) - 1 for pack in packs]
    before = [sum(segments[:i]) for i in range(len(packs))]
    for name, value in first.items():
        parts = [pack[name] for pack in packs]
        if name == "cu_seqlens":
            lengths = torch.cat([part.diff() for part in parts])
            joined[name] = torch.cat([value.new_zeros(1), lengths.cumsum(0).to(value.dtype)])
        elif name in NUMBERED:
            moved = [
                torch.where(part < 0, part, part + n) for part, n in zip(parts, before, strict=True)
            ]
            joined[name] = torch.cat(moved)
        elif isinstance(value, torch.Tensor):
            joined[name] = torch.cat(parts)
        else:
            joined[name] = max(parts) if name == "max_seqlen" else value
    joined.meta = first.meta | {
        name: [element for pack in packs for element in pack.meta.get(name, ())]
        for name in LISTED
        if name in first.meta
    }
    if hasattr(first, "vision"):
        joined.vision = first.vision
    return joined


def padding_like(pack: MicroBatch) -> MicroBatch:
    """One segment of padding of the same length and dtypes, token 0, without images."""
    missing = [name for name in PADDED if name not in pack]
    if missing:
        raise ConfigError(
            f'remainder is "pad", but the packs have no {", ".join(missing)}, so padding cannot be '
            'made like them; use remainder="drop"'
        )
    length = len(pack["input_ids"])
    batch = MicroBatch()
    for name, value in pack.items():
        if not isinstance(value, torch.Tensor):
            batch[name] = value
        elif value.shape[:1] == (length,) and name in ("input_ids", "labels", "doc_ids"):
            fill = {"input_ids": 0, "labels": IGNORE, "doc_ids": -1}[name]
            batch[name] = torch.full_like(value, fill)
        elif name == "position_ids":
            batch[name] = torch.arange(length, dtype=value.dtype, device=value.device)
        elif name == "cu_seqlens":
            batch[name] = value.new_tensor([0, length])
        elif name == "doc_lengths":
            batch[name] = value.new_tensor([length])
        else:
            batch[name] = value.new_zeros((0, *value.shape[1:]))
    if "max_seqlen" in batch:
        batch["max_seqlen"] = length
    empty = {"pack_ids": [f"pad.{length}"], "pack_numbers": [-1], "sample_keys": [[]], "holes": []}
    batch.meta = {k: v for k, v in pack.meta.items() if k not in LISTED} | {
        name: value for name, value in empty.items() if name in pack.meta
    }
    if hasattr(pack, "vision"):
        batch.vision = pack.vision
    return batch
