"""What the keeper of the fleet and the coordinator tell each other, once a second.

Invariants: plain values, which outlive the process that made them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP_S = 1.0
"""The fleet is looked at so often, and when the coordinator or the end of an actor says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """What the coordinator knows."""

    target_workers: int
    by_hand: bool
    """Whether that number was set by hand."""
    workers: dict[str, bool]
    """Id -> whether it drains, of those that hold a lease."""
    stagers: tuple[str, ...]
    """Nodes whose stager holds a lease."""
    drained: tuple[str, ...] = ()
    """Nodes that nothing is to run on."""
    winding_down: bool = False
    """Whether the whole service drains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetNews:
    """What the keeper knows."""

    ended: dict[str, str]
    """Id of each worker whose process has ended since the last call -> how, in words. Not of
    stagers: their lease is long on purpose, so that a new one takes over before lanes move."""
    drain: tuple[str, ...]
    """Workers to drain."""
    room: int
    """Workers that the cores of the data nodes take."""
    without_room: int = 0
    """Workers that Ray has found no node for."""
    target: int | None = None
    """What the coordinator wanted last, for one that was started again; None before the first."""
    by_hand: bool = False
    drained: tuple[str, ...] = ()
    """That it knew, as are the next two."""
    winding_down: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    """Id -> host of all data nodes, the drained ones too."""
