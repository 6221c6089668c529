"""`compiled`: numba's njit where numba is present, the function itself where it is not.

Invariants: a decorated function uses integer arithmetic only, so both forms give equal results;
numba is never required. Compiled code is cached on disk where a cache directory can be written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator; NUMBA_DISABLE_JIT=1 in the environment keeps the Python form."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return function
    try:
        jitted = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no place to cache: a read-only install without a home directory
        jitted = numba.njit(nogil=True)(function)
    return cast(Callable[P, T], jitted)
