"""What to think of a pack whose workers end without a word.

Invariants: a pure function; a pack that ends every worker it is given to is isolated after two at
the latest, built alone after three and condemned after ALONE_ENDS more; one that is not under build
when a worker ends is never condemned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ALONE_ENDS = 3
"""A pack that was under build, alone, when so many workers ended is what ends them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    losses: int = 0
    """Workers that had the pack to build when they ended without a word."""
    isolated: bool = False
    """Its pictures are decoded in a process of their own: most that ends a worker is a picture."""
    alone: bool = False
    """The worker says when it begins to build it, and builds no other such pack meanwhile."""
    ends: int = 0
    """Workers that ended while they built it alone."""

    @property
    def condemned(self) -> bool:
        return self.ends >= ALONE_ENDS


def after_loss(before: Suspicion, *, in_reach: bool, under_build: bool) -> Suspicion:
    """`in_reach`: the worker may have been building it when it ended; `under_build`: it had said
    that it builds it alone, and not that it has."""
    losses = before.losses + 1
    return replace(
        before,
        losses=losses,
        isolated=before.isolated or in_reach or losses >= 2,
        alone=before.alone or (before.isolated and (in_reach or losses >= 3)),
        ends=before.ends + (before.alone and under_build),
    )
