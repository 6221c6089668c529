"""The data nodes among Ray's nodes, and how many workers they take.

Invariants: a node counts while Ray holds it alive and it has the resource that marks data nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataservice.core.fleet import workers_of_node

UNLIMITED = 1 << 20
"""Workers; no node takes so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataNode:
    node_id: str
    host: str
    """Host name, matched with the trainers'."""
    cores: int
    """That workers are counted by."""
    room: int
    """Workers that Ray may start there: their CPUs fit."""


def data_nodes(
    found: Iterable[Mapping[str, Any]], *, resource: str, num_cpus: float, own_cores: int | None
) -> dict[str, DataNode]:
    """By node id, of what `ray.nodes()` gives. `own_cores`: of this machine, for a Ray of our own,
    which does not count cores: it is told what to allow."""
    nodes: dict[str, DataNode] = {}
    for node in found:
        has = node["Resources"]
        if not node["Alive"] or has.get(resource, 0) <= 0:
            continue
        cpus = has.get("CPU", 0)
        nodes[node["NodeID"]] = DataNode(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            cores=int(cpus) if own_cores is None else own_cores,
            room=int((cpus + 1e-6) / num_cpus) if num_cpus > 0 else UNLIMITED,
        )
    return nodes


def workers_of_nodes(nodes: Iterable[DataNode]) -> int:
    """The fewest that keep all their cores decoding."""
    return sum(workers_of_node(node.cores) for node in nodes)
