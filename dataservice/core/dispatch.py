"""Which worker builds which pack, and in which order a worker builds what it was given.

Invariants: pure functions of small numbers; the worker of a pack follows from the rank it goes to,
so that a client talks to as few workers as it can while every worker gets an equal share.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence


def worker_slot(dp_rank: int, micro_step: int, *, dp_size: int, num_workers: int) -> int:
    """Slot in 0..num_workers-1 that builds the pack of a cell.

    Ranks are dealt to slots round robin; the ranks left over when the two numbers do not divide
    (all of them, where there are fewer ranks than workers) are dealt anew at each micro-step.
    """
    even = dp_size - dp_size % num_workers
    if dp_rank < even:
        return dp_rank % num_workers
    return (dp_rank - even + micro_step * (dp_size - even)) % num_workers


def choose_worker(
    dp_rank: int,
    micro_step: int,
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
        usable = [w for w in group if w not in avoid]
        if usable:
            slot = worker_slot(dp_rank, micro_step, dp_size=dp_size, num_workers=len(usable))
            return usable[slot]
    if not all_workers:
        return None
    slot = worker_slot(dp_rank, micro_step, dp_size=dp_size, num_workers=len(all_workers))
    return all_workers[slot]


def next_to_build(
    waiting: Sequence[tuple[int, int, int]],
    sizes: Sequence[int],
    ready_bytes_of_rank: Mapping[int, int],
    *,
    ready_bytes_bound: int,
    num_ranks: int,
    asked: Container[int] = (),
    among: Container[int] | None = None,
) -> int | None:
    """Position in `waiting` of the pack to build next, or None while there is none to build.

    `waiting` holds (step, micro_step, dp_rank), `sizes` their bytes, `asked` the positions of those
    that a client waits for. The first in the order of need is chosen that is in `among` (None: any)
    and is asked for or fits: a rank may hold an equal share of the bound and always one pack, so
    one stalled client never takes the room of the others. A pack fits only where all of its rank
    that are needed earlier do, so one that is built out of turn takes no room from them.
    """
    share = ready_bytes_bound // max(1, num_ranks)
    taken: dict[int, int] = {}
    for i in sorted(range(len(waiting)), key=waiting.__getitem__):
        rank = waiting[i][2]
        before = taken.get(rank, ready_bytes_of_rank.get(rank, 0))
        taken[rank] = before + sizes[i]
        fits = before == 0 or taken[rank] <= share
        if (fits or i in asked) and (among is None or i in among):
            return i
    return None
