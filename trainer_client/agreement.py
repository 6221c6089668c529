"""What the ranks of a job settle among themselves over torch.distributed: a run id, and that each
reads its own packs.

Invariants: the check uses the job's key-value store alone, no collective, so it may run in any
thread and beside whatever the trainer exchanges; every wait has a deadline; all ranks that read are
told the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dataservice.errors import ConfigError, DeadlineExceeded
from dataservice.wire.messages import SessionOpened, StepCells
from trainer_client.layout import ParallelLayout, named_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MOST_NUMBERS = 8
"""Packs of a rank's first step that are compared."""
POLL_S = (0.005, 0.2)
"""First and longest pause between two looks at the store; the longest grows with the ranks."""
LOOKS_S = 2000
"""At the store, of all ranks that wait together."""
REMEDY = (
    "give every process the ParallelLayout of the job with its own rank: from_env, from_mesh and "
    "from_megatron read it off"
)


class SharedRunId(str):
    """A run id that all ranks of torch.distributed's default group have."""


def shared_run_id(layout: ParallelLayout) -> SharedRunId:
    """A new one, drawn by global rank 0. Every rank of the default group must call it, also those
    that do not read; ConfigError where `layout` is not of this process in that group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if layout.world_size == 1:
            return SharedRunId(uuid.uuid4().hex)
        raise ConfigError(
            f"run_id is not given, the layout has {layout.world_size} ranks and torch.distributed "
            "is not initialised: initialise it first, or pass the same new run_id on every rank at "
            "every start"
        )
    on_gpu = dist.get_backend() == "nccl"
    drawn = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8)
    shared = drawn.to("cuda") if on_gpu else drawn
    dist.broadcast(shared, src=0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (layout.rank, layout.world_size) != (rank, world_size):
        raise ConfigError(
            f"the layout is of rank {layout.rank} in a job of {layout.world_size}, this process is "
            f"rank {rank} of {world_size}: {REMEDY}; where torch.distributed spans more than the "
            "job, pass run_id"
        )
    return SharedRunId(bytes(shared.cpu().tolist()).hex())


def check_alignment(layout: ParallelLayout, opened: SessionOpened) -> None:
    """ConfigError unless the documents of the service's packs can be cut as `layout` cuts them."""
    needed = layout.alignment
    if opened.align % needed:
        sizes = f"cp = {layout.cp}, tp = {layout.tp}"
        with_sp = " and sequence parallelism" if layout.sequence_parallel else ""
        raise ConfigError(
            f"documents take multiples of plan.align = {opened.align} tokens, {sizes}{with_sp} "
            f"need multiples of {needed}: set `plan.align: {needed}` in the service's config"
        )


def check_first_packs(
    layout: ParallelLayout,
    run_id: str,
    opened: SessionOpened,
    cells: StepCells | None,
    *,
    timeout_s: float,
) -> None:
    """ConfigError, on every rank that reads, where two DP ranks got the same pack of the first step
    or peers got different ones.

    `cells`: this rank's share of the step; None: the data has ended. Every rank that reads must
    call it; DeadlineExceeded after `timeout_s` names those that did not.
    """
    from torch.distributed import distributed_c10d as c10d

    store = c10d.PrefixStore(f"dataservice/{run_id}", c10d._get_default_store())
    turn = store.add(f"turn/{layout.rank}", 1)  # the same run may open another stream
    readers = [rank for rank in range(layout.world_size) if layout.reads_at(rank)]
    row = [layout.rank, layout.dp_rank, opened.session, *_numbers(cells)]
    store.set(f"{turn}/{layout.rank}", ",".join(map(str, row)))
    until = time.monotonic() + timeout_s
    longest_s = max(POLL_S[1], len(readers) / LOOKS_S)
    if layout.rank == readers[0]:
        keys = [f"{turn}/{rank}" for rank in readers]
        late = _wait(store, keys, until)
        absent = [int(key.partition("/")[2]) for key in late]
        text = f"!{named_ranks(absent)} did not come" if late else _verdict(_rows(store, keys))
        store.set(f"{turn}/verdict", text)
    elif _wait(store, [f"{turn}/verdict"], until + longest_s, longest_s):
        raise DeadlineExceeded(
            f"rank {layout.rank} waited {timeout_s:.3g} s for rank {readers[0]} to compare the "
            "packs of all ranks"
        )
    text = store.get(f"{turn}/verdict").decode()
    if text.startswith("!"):
        raise DeadlineExceeded(f"the packs of all ranks were to be compared: {text[1:]}")
    if text:
        raise ConfigError(f"{text}: {REMEDY}")


def _numbers(cells: StepCells | None) -> list[int]:
    if cells is None:
        return []
    return [place.number for cell in cells.cells for place in cell][:MOST_NUMBERS]


def _wait(
    store: Store, keys: Sequence[str], until: float, longest_s: float = POLL_S[1]
) -> list[str]:
    """Keys that are not there by then. By asking again, so that no other user of the store has to
    wait for this one."""
    pause = POLL_S[0]
    while not store.check(list(keys)):
        if time.monotonic() >= until:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause)
        pause = min(longest_s, pause * 2)
    return []


def _rows(store: Store, keys: Sequence[str]) -> list[list[int]]:
    return [[int(value) for value in store.get(key).decode().split(",")] for key in keys]


def _verdict(rows: Sequence[Sequence[int]]) -> str:
    """Of (rank, dp_rank, session, pack numbers...) each; "" when all is well."""
    first_of: dict[int, Sequence[int]] = {}
    owner: dict[int, Sequence[int]] = {}
    for row in rows:
        rank, dp_rank, session, *numbers = row
        if session != rows[0][2]:
            return f"rank {rank} reads session {session}, rank {rows[0][0]} session {rows[0][2]}"
        first = first_of.setdefault(dp_rank, row)
        if list(first[3:]) != numbers:
            return (
                f"ranks {first[0]} and {rank} share dp_rank {dp_rank} and got different packs: "
                f"{list(first[3:])} and {numbers}"
            )
        for number in numbers:
            other = owner.setdefault(number, row)
            if number >= 0 and other[1] != dp_rank:
                return (
                    f"ranks {other[0]} and {rank} have dp_rank {other[1]} and {dp_rank} and got "
                    f"the same pack, number {number}"
                )
    return ""
