"""numba's cache of compiled code on disk; importing this needs numba.

Invariants: the cache stops nothing. What is damaged counts as absent and is written anew; what
cannot be written, such as to a full disk, is compiled again by the next process.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

_numba: Any = importlib.import_module("numba")
_caching: Any = importlib.import_module("numba.core.caching")


def cache_in(folder: str, dispatcher: Any) -> None:
    """Keeps what a function that was given to njit is compiled to in that folder."""
    configured = _numba.config.CACHE_DIR
    _numba.config.CACHE_DIR = folder  # read when a cache is made
    try:
        with contextlib.suppress(OSError, RuntimeError):  # the latter: numba finds no place in it
            dispatcher._cache = _Cache(dispatcher.py_func)
    finally:
        _numba.config.CACHE_DIR = configured


class _Cache(_caching.FunctionCache):  # type: ignore[misc, unused-ignore]
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # reading a damaged file may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
