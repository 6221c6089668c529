"""The faults of a chaos run, drawn at random: what, whom, when and for how long.

Invariants: the faults follow from the seed alone; what they do to a run also depends on its timing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

LEAST_PAUSE_S, MEAN_PAUSE_S, LONGEST_PAUSE_S = 0.3, 3.0, 10.0

DP_SIZES = (4, 4, 4, 2, 3)
"""Of a run that is started anew, drawn from these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    name: str
    weight: int
    longest_s: float = 0.0
    """Of what lasts."""
    restarts: bool = False
    """The whole training run starts anew from its last saved state."""


KINDS = (
    Kind(name="worker killed", weight=4),
    Kind(name="worker stopped", weight=3, longest_s=6.0),
    Kind(name="worker told to end", weight=2),
    Kind(name="worker joins", weight=1, longest_s=20.0),
    Kind(name="coordinator killed", weight=3),
    Kind(name="coordinator stopped", weight=2, longest_s=5.0),
    Kind(name="coordinator told to end", weight=1),
    Kind(name="planner killed", weight=1),
    Kind(name="stager killed", weight=2),
    Kind(name="stager stopped", weight=1, longest_s=8.0),
    Kind(name="stager told to end", weight=1),
    Kind(name="node killed", weight=1),
    Kind(name="node stopped", weight=1, longest_s=6.0),
    Kind(name="rank killed", weight=2, restarts=True),
    Kind(name="rank told to end", weight=1, restarts=True),
    Kind(name="rank stopped", weight=2, longest_s=8.0),
    Kind(name="connections reset", weight=3),
    Kind(name="connections frozen", weight=2, longest_s=6.0),
    Kind(name="connections half open", weight=2),
    Kind(name="connections refused", weight=2, longest_s=3.0),
    Kind(name="connections slow", weight=1, longest_s=6.0),
    Kind(name="connections cut in an answer", weight=3),
    Kind(name="origin fails", weight=2, longest_s=2.0),
    Kind(name="origin slow", weight=1, longest_s=4.0),
    Kind(name="disk full", weight=1, longest_s=5.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    kind: Kind
    after_s: float
    """Since the one before."""
    lasts_s: float
    target: float
    """Whom it hits, as a place among those there are, from 0 to below 1."""
    amount: float
    """How much of what it does, from 0 to below 1."""
    dp_size: int
    """Of the run after it."""


def draw_faults(seed: int, *, without: frozenset[str] = frozenset()) -> Iterator[Fault]:
    """Endless. `without`: names of kinds that cannot be had here."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind.name not in without]
    weights = [kind.weight for kind in kinds]
    while True:
        (kind,) = rng.choices(kinds, weights)
        pause_s = rng.expovariate(1 / MEAN_PAUSE_S)
        yield Fault(
            kind=kind,
            after_s=min(max(pause_s, LEAST_PAUSE_S), LONGEST_PAUSE_S),
            lasts_s=rng.uniform(0.1, kind.longest_s) if kind.longest_s else 0.0,
            target=rng.random(),
            amount=rng.random(),
            dp_size=rng.choice(DP_SIZES),
        )
