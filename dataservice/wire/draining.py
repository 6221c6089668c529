"""Messages between an operator and the coordinator about who is to leave.

Invariants: as in wire.messages, of which these are a part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Of a worker, of a node, or, with neither, of the whole service. May be asked again and again
    to learn how far it is."""

    worker: str = ""
    """Id."""
    node: str = ""
    """Ray's id of it, the beginning of that, or the host's name."""
    now: bool = False
    """True: workers do not wait until what they have built is fetched; others build it anew."""
    undo: bool = False
    """True: the node takes lanes and workers again."""
    again: bool = False
    """True: who is not there any more has left since it was asked first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    done: bool
    """Whether nothing is left, so that it can end."""
    workers: tuple[str, ...] = ()
    """Ids of those that are still to leave."""
    packs: int = 0
    """That they have, and nobody has fetched."""
    lanes: int = 0
    """That the node still stages."""
    words: str = ""
    """How far it is."""
