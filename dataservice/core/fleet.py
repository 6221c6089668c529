"""Which stagers and workers to start and stop, from what is alive and what is wanted, and how many
workers with how many decode threads a machine takes.

Invariants: one stager a data node; workers spread evenly over data nodes; nothing is placed on a
node that is suspected dead; workers that no node has room for are placed nowhere, and are the first
to go; the same picture always gives the same decision.
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


NOWHERE = ""
"""In place of a node: for whoever has room, once somebody has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChange:
    start_stagers: tuple[str, ...]
    """Nodes that need a stager."""
    start_workers: tuple[str, ...]
    """One entry a worker to start: the node it goes to, or NOWHERE."""
    drain_workers: tuple[str, ...]
    """Worker ids to drain."""


def plan_fleet(
    *,
    nodes: Mapping[str, int],
    stagers: Sequence[str],
    workers: Mapping[str, str],
    target: int,
    wait_for_nodes: bool = False,
    starting: bool = False,
) -> FleetChange:
    """`nodes`: usable data nodes -> workers that each has room for; `stagers`: nodes that have one;
    `workers`: id -> node, or NOWHERE, of the live ones that are not draining; `target`: how many
    workers there should be; `wait_for_nodes`: whether they may be started while there is none;
    `starting`: whether one of them is not up yet.

    A node that joined, or was crowded out, gets workers of crowded ones, one at a time: the new one
    comes up before the old one is drained."""
    load = Counter(dict.fromkeys(nodes, 0))
    for node in workers.values():
        if node in load:
            load[node] += 1
    start: list[str] = []
    for _ in range(max(0, target - len(workers)) if nodes or wait_for_nodes else 0):
        free = [n for n in sorted(load) if load[n] < nodes[n]]
        node = min(free, key=lambda n: load[n]) if free else NOWHERE
        if free:
            load[node] += 1
        start.append(node)
    if nodes and len(workers) == target and not starting:
        start += _spread(nodes, load)
    left = dict(workers)
    drain: list[str] = []
    while len(left) > target and not (starting and len(left) == target + 1):
        crowd = Counter(left.values())
        worker = max(left, key=lambda w: (left[w] == NOWHERE, crowd[left[w]], w))
        del left[worker]
        drain.append(worker)
    return FleetChange(
        start_stagers=tuple(n for n in sorted(nodes) if n not in stagers),
        start_workers=tuple(start),
        drain_workers=tuple(drain),
    )


def _spread(nodes: Mapping[str, int], load: Counter[str]) -> list[str]:
    """The node that should have a worker of a crowded one."""
    free = [n for n in sorted(load) if load[n] < nodes[n]]
    emptiest = min(free, key=lambda n: load[n], default=None)
    if emptiest is None or max(load.values()) < load[emptiest] + 2:
        return []
    return [emptiest]
