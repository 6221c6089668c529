"""Which node stages which lane, from the names of the nodes alone.

Invariants: deterministic, independent of the order of the names; no node holds more than
ceil(lanes / nodes); when a node leaves or joins, mostly its own lanes move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def lane_nodes(num_lanes: int, node_names: Sequence[str]) -> tuple[int, ...]:
    """Index into `node_names` for each lane, by rendezvous hashing with a cap.

    All (lane, node) pairs are taken from the highest hash down; a pair counts when the lane is free
    and the node below its cap. ValueError for no node, a name that occurs twice, or a negative
    count.
    """
    if num_lanes < 0:
        raise ValueError(f"num_lanes is {num_lanes}; it must not be negative")
    if not node_names:
        raise ValueError("node_names is empty; at least one node must stage data")
    if len(set(node_names)) != len(node_names):
        raise ValueError(f"node_names {list(node_names)} has a name twice; names must be distinct")
    cap = -(-num_lanes // len(node_names))
    pairs = sorted(
        (hashlib.sha256(f"{lane}\x1f{name}".encode()).digest(), lane, node)
        for node, name in enumerate(node_names)
        for lane in range(num_lanes)
    )
    home = [-1] * num_lanes
    held = [0] * len(node_names)
    for _, lane, node in reversed(pairs):
        if home[lane] < 0 and held[node] < cap:
            home[lane] = node
            held[node] += 1
    return tuple(home)
