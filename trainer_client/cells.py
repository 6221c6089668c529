"""What a step's cells become at the trainer: the micro-batch with its meta, the place behind it.

Invariants: `meta` has JSON types and is complete but for the seconds waited.
"""

from __future__ import annotations

from typing import Any

from dataservice.rpc.local_client import Pack
from dataservice.wire.codec import pack_digest
from dataservice.wire.messages import StepCells, StepSettings
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.session import Delivered, Session


def after(cells: StepCells, micro_step: int) -> Delivered:
    """The position behind a micro-step."""
    if micro_step + 1 < len(cells.cells):
        return Delivered(step=cells.step, micro_step=micro_step + 1)
    return Delivered(step=cells.step + 1, micro_step=0)


def make_batch(
    session: Session, cells: StepCells, micro_step: int, packs: list[Pack], *, digests: bool
) -> MicroBatch:
    """The micro-batch of one cell on the CPU."""
    places = cells.cells[micro_step]
    meta: dict[str, Any] = {
        "step": cells.step,
        "micro_step": micro_step,
        "dp_rank": session.request.dp_rank,
        "plan_digest": session.opened.plan_digest,
        "pack_ids": [place.pack_id for place in places],
        "pack_numbers": [place.number for place in places],
        "loss_tokens": cells.loss_tokens,
        "num_images": cells.num_images[micro_step],
        "ranks_without_images": cells.ranks_without_images[micro_step],
        **_settings(session, cells.settings),
        "num_packs": len(places),
        "next_step": None,
        "waited_s": 0.0,
        "step_waited_s": 0.0,
    }
    if cells.next_step is not None:
        num_packs = list(cells.next_step.num_packs)
        meta["next_step"] = _settings(session, cells.next_step) | {"num_packs": num_packs}
    if digests:
        meta["digests"] = [pack_digest(arrays) for arrays, _ in packs]
    return build_micro_batch(
        packs,
        meta=meta,
        is_last_micro_step=micro_step + 1 == len(cells.cells),
        vision=VisionInfo.of(session.opened),
    )


def _settings(session: Session, settings: StepSettings) -> dict[str, Any]:
    """What limits a picture is max_tiles where pictures are tiles."""
    tiles = session.opened.tile > 0
    limit = {"max_tiles": settings.max_tiles} if tiles else {"max_pixels": settings.max_pixels}
    return {"pack_length": settings.pack_length, **limit}
