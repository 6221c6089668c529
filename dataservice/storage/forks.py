"""Lets objects with threads, locks or descriptors start anew in a forked child.

Invariants: `after_fork` of every living object that asked for it is called in the child before any
other code of the child runs, so no lock is held and no second thread is there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def after_fork(self) -> None:
        """In the child: forget what belongs to the parent."""


_OBJECTS: weakref.WeakSet[Forkable] = weakref.WeakSet()


def renew_in_children(owner: Forkable) -> None:
    """Calls `owner.after_fork` in every child that this process forks while `owner` lives."""
    _OBJECTS.add(owner)


def _after_fork() -> None:
    for owner in list(_OBJECTS):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
