"""Which worker builds which pack, and in which order a worker builds what it was given.

Invariants: pure functions of small numbers; the worker of a pack follows from the rank it goes to,
so that a client talks to as few workers as it can while every worker gets an equal share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


def worker_slot(dp_rank: int, round_number: int, *, dp_size: int, num_workers: int) -> int:
    """Slot in 0..num_workers-1 that builds the pack of a cell.

    `round_number`: of the micro-step, counted on from step to step. Ranks are dealt to slots round
    robin; the ranks left over when the two numbers do not divide (all of them, where there are
    fewer ranks than workers) are dealt anew in each round.
    """
    even = dp_size - dp_size % num_workers
    if dp_rank < even:
        return dp_rank % num_workers
    return (dp_rank - even + round_number * (dp_size - even)) % num_workers


def choose_worker(
    dp_rank: int,
    round_number: int,
    *,
    dp_size: int,
    home_workers: Sequence[str],
    all_workers: Sequence[str],
    avoid: frozenset[str] = frozenset(),
) -> str | None:
    """A worker on the node that stages the pack's lane, else any; None when there is none.

    `avoid` names workers on which the pack has failed; they are used only when nobody else is left.
    """
    for group in (home_workers, all_workers):
        usable = [w for w in group if w not in avoid] if avoid else group
        if usable:
            slot = worker_slot(dp_rank, round_number, dp_size=dp_size, num_workers=len(usable))
            return usable[slot]
    if not all_workers:
        return None
    slot = worker_slot(dp_rank, round_number, dp_size=dp_size, num_workers=len(all_workers))
    return all_workers[slot]


class Candidate(NamedTuple):
    """A pack that waits to be built."""

    dp_rank: int
    size_bytes: int
    asked: bool = False
    """Whether a client waits for it."""
    usable: bool = True
    """Whether the builder that looks for one takes its kind."""


def next_to_build(
    waiting: Iterable[Candidate],
    ready_bytes_of_rank: Mapping[int, int],
    *,
    ready_bytes_bound: int,
    num_ranks: int,
) -> int | None:
    """Position in `waiting` of the pack to build next, or None while there is none to build.

    `waiting` is in the order of need, and read no further than the pack chosen: the first that is
    usable and is asked for or fits. A rank may hold an equal share of the bound and always one
    pack, so one stalled client never takes the room of the others. A pack fits only where all of
    its rank that are needed earlier do, so one that is built out of turn takes no room from them.
    """
    share = ready_bytes_bound // max(1, num_ranks)
    taken: dict[int, int] = {}
    for i, pack in enumerate(waiting):
        before = taken.get(pack.dp_rank, ready_bytes_of_rank.get(pack.dp_rank, 0))
        taken[pack.dp_rank] = before + pack.size_bytes
        fits = before == 0 or taken[pack.dp_rank] <= share
        if pack.usable and (fits or pack.asked):
            return i
    return None
