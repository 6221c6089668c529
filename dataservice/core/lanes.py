"""Which node stages which lane, from the names of the nodes and who holds the lanes already.

Invariants: deterministic, independent of the order of the names; every node has floor(lanes /
nodes) or one more; no lane leaves its holder that need not for that, so when a node leaves, the
others keep theirs, and when one joins, it gets floor(lanes / nodes) and nothing else moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def lane_nodes(
    num_lanes: int, node_names: Sequence[str], holders: Sequence[str] = ()
) -> tuple[int, ...]:
    """Index into `node_names` for each lane, by rendezvous hashing with a cap.

    `holders`: name of the node that has staged the lane so far, by lane; empty where nobody has, or
    names that are not among `node_names`, say nothing. All (lane, node) pairs are taken from the
    highest hash down, those of holders first; a pair counts when the lane is free and the node has
    room. ValueError for no node, a name that occurs twice, a negative count, or holders of another
    number of lanes.
    """
    if num_lanes < 0:
        raise ValueError(f"num_lanes is {num_lanes}; it must not be negative")
    if not node_names:
        raise ValueError("node_names is empty; at least one node must stage data")
    if len(set(node_names)) != len(node_names):
        raise ValueError(f"node_names {list(node_names)} has a name twice; names must be distinct")
    if len(holders) not in (0, num_lanes):
        raise ValueError(f"holders names {len(holders)} lanes; num_lanes is {num_lanes}")
    least, larger = divmod(num_lanes, len(node_names))
    pairs = sorted(
        (
            bool(holders) and holders[lane] == name,
            hashlib.sha256(f"{lane}\x1f{name}".encode()).digest(),
            lane,
            node,
        )
        for node, name in enumerate(node_names)
        for lane in range(num_lanes)
    )
    home = [-1] * num_lanes
    held = [0] * len(node_names)
    for _, _, lane, node in reversed(pairs):
        if home[lane] >= 0 or held[node] > least or (held[node] == least and not larger):
            continue
        larger -= held[node] == least
        home[lane] = node
        held[node] += 1
    return tuple(home)
