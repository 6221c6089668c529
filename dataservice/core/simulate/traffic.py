"""What a redistribution of loaded packs would move between nodes, and how much of it would show.

Invariants: only packs whose home is another node than their rank's move; a node sends and receives
at once, each at the full speed of its network; the busiest node of a micro-step sets its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Of one step, or the mean of several."""

    moved_packs: float
    moved_share: float
    """Of the step's packs."""
    moved_bytes: float
    busiest_node_bytes: Floats
    """[micro-steps] bytes that the busiest node sends or receives, whichever is more."""


def mean_traffic(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        moved_packs=float(np.mean([part.moved_packs for part in parts])),
        moved_share=float(np.mean([part.moved_share for part in parts])),
        moved_bytes=float(np.mean([part.moved_bytes for part in parts])),
        busiest_node_bytes=np.mean([part.busiest_node_bytes for part in parts], axis=0),
    )


def traffic_of(
    pack_bytes: Ints,
    home: Ints,
    node: Ints,
    micro_step: Ints,
    *,
    micro_steps: int,
    num_nodes: int,
) -> Traffic:
    """Of packs with a home node, the node that computes them and when, int64 [M] each."""
    moved = np.flatnonzero(node != home)
    loads = [
        np.bincount(
            micro_step[moved] * num_nodes + end[moved],
            weights=pack_bytes[moved],
            minlength=micro_steps * num_nodes,
        ).reshape(micro_steps, num_nodes)
        for end in (home, node)
    ]
    return Traffic(
        moved_packs=float(len(moved)),
        moved_share=len(moved) / len(node),
        moved_bytes=float(pack_bytes[moved].sum()),
        busiest_node_bytes=np.maximum(*loads).max(axis=1),
    )


def exposed_ms(compute_ms: Floats, node_bytes: Floats, node_gbits: float) -> tuple[float, float]:
    """(without overlap, with overlap): milliseconds that communication adds to a step.

    compute_ms, node_bytes [micro-steps]. Without overlap every micro-step's packs travel before it
    is computed. With it T = sum_g max(compute_g, comm_(g+1)) + comm_1: while a micro-step is
    computed the next one's packs travel, and only the first's have to be waited for.
    """
    comm_ms = node_bytes * 8 / (node_gbits * 1e6)
    ahead = np.append(comm_ms[1:], 0.0)
    overlapped = np.maximum(compute_ms, ahead).sum() + comm_ms[0] - compute_ms.sum()
    return float(comm_ms.sum()), float(overlapped)
