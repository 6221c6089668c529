"""Which stagers and workers to start and stop, from what is alive and what is wanted, and how many
workers with how many decode threads a machine takes.

Invariants: one stager a data node; workers spread evenly over data nodes; nothing is placed on a
node that is suspected dead; the same picture always gives the same decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CORES_A_WORKER = 2
"""Two decode threads of one process do what two processes do on photos, nine tenths of it on mixed
data and 0.7 to 0.8 on nothing but small pictures, where the interpreter's part of the work, one
thread's at a time, is a sixth (`benchmarks/decode.py`, scaling). A whole service on two cores is no
faster with two processes, which have a client, a planner and each other beside them."""


def workers_of_node(cores: int) -> int:
    """The fewest processes that keep all cores decoding."""
    return max(1, -(-cores // CORES_A_WORKER))


def decode_threads(cores: int) -> int:
    """Of each worker, on a machine with so many cores and `workers_of_node` of them."""
    return max(1, -(-cores // workers_of_node(cores)))


def workers_at_start(cores_of_nodes: Sequence[int], *, least: int, most: int) -> int:
    return max(least, min(most, sum(map(workers_of_node, cores_of_nodes))))


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChange:
    start_stagers: tuple[str, ...]
    """Nodes that need a stager."""
    start_workers: tuple[str, ...]
    """One entry a worker to start: the node it goes to."""
    drain_workers: tuple[str, ...]
    """Worker ids to drain."""


def plan_fleet(
    *,
    nodes: Sequence[str],
    stagers: Sequence[str],
    workers: Mapping[str, str],
    target: int,
) -> FleetChange:
    """`nodes`: usable data nodes; `stagers`: nodes that have one; `workers`: id -> node of the live
    ones that are not draining; `target`: how many workers there should be."""
    load = Counter(dict.fromkeys(nodes, 0))
    for node in workers.values():
        if node in load:
            load[node] += 1
    start: list[str] = []
    for _ in range(max(0, target - len(workers)) if nodes else 0):
        node = min(sorted(load), key=lambda n: load[n])
        load[node] += 1
        start.append(node)
    left = dict(workers)
    drain: list[str] = []
    while len(left) > target:
        crowd = Counter(left.values())
        worker = max(left, key=lambda w: (crowd[left[w]], w))
        del left[worker]
        drain.append(worker)
    return FleetChange(
        start_stagers=tuple(n for n in sorted(nodes) if n not in stagers),
        start_workers=tuple(start),
        drain_workers=tuple(drain),
    )
