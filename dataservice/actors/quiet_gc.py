"""Keeps Python's garbage collector from going through again and again what stays.

Invariants: what ends in a cycle is still found, most of it young.
"""

from __future__ import annotations

import gc

OLDEST_EVERY = 1000
"""Collections of the middle generation between two of the oldest, which goes through a hundred
thousand objects where a thousand calls wait for their answers: 30 ms in which an event loop does
nothing else."""


def keep_gc_quiet(young: int | None = None) -> None:
    """To be called once by a process that has begun to serve: what is there now stays. `young`: new
    objects between two collections of the youngest, where many are made and let go at once."""
    gc.collect()
    gc.freeze()
    usual, middle, _ = gc.get_threshold()
    gc.set_threshold(usual if young is None else young, middle, OLDEST_EVERY)
