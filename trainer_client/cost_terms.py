"""What a micro-batch's compute time is made of, for a log that `dataservice fit-cost` reads.

Invariants: the terms are those by which the planner costs the same packs; padding and filler count
nowhere.
"""

from __future__ import annotations

from trainer_client.batch import MicroBatch

P_REF = 4096
"""Patches at which an image's attention costs as much as the rest of it; plan.p_ref's default."""


def cost_terms(batch: MicroBatch) -> dict[str, int]:
    """`patches`, `patches_squared` (over images, or tiles) and `length_squared` (over documents).

    Reads image_grid_thw (before the merge) or num_tiles, cu_seqlens, doc_lengths and doc_ids.
    With a time they make one row of a log (`trainer_client.timing.CostTimer` writes such rows, with
    the vision part's time by itself):

        end.synchronize()
        row = cost_terms(batch) | {"ms": start.elapsed_time(end)}
        log.write(json.dumps(row) + "\\n")

    Time what this rank computes, forward and backward, and not how long it waits: from two CUDA
    events around them, before the collective that ends the micro-step (with DDP, inside
    `no_sync`). Where layers gather weights from other ranks, time one rank or node by itself.
    Leave the first steps out, which compile and allocate. A thousand rows of the real mix are
    plenty. On a CUDA batch this waits for the device, so call it after the end event.
    """
    if batch.vision.tile:
        own = batch.vision.row_patches
        patches = batch["num_tiles"] * own
        squared = patches * own
    else:
        patches = batch["image_grid_thw"].prod(dim=1)
        squared = patches * patches
    starts = batch["cu_seqlens"][:-1].long()
    lengths = batch["doc_lengths"].long()[batch["doc_ids"][starts] >= 0]
    return {
        "patches": int(patches.sum()),
        "patches_squared": int(squared.sum()),
        "length_squared": int((lengths * lengths).sum()),
    }
