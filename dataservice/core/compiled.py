"""`compiled`: numba's njit where numba is present, the function itself where it is not.

Invariants: a decorated function uses integer arithmetic only, so both forms give equal results;
numba is never required. Compiled code is cached on disk where a folder can be written, in one whose
name follows from all sources of the package: numba looks for changes in a function's own file only,
and code compiled from another version of a helper would give another plan.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def has_compiler() -> bool:
    """Whether `compiled` compiles."""
    try:
        return not importlib.import_module("numba").config.DISABLE_JIT
    except ImportError:
        return False


def compiled(function: Callable[P, T], *, package: Path = Path(__file__).parent) -> Callable[P, T]:
    """Decorator; NUMBA_DISABLE_JIT=1 in the environment keeps the Python form.

    `package`: the folder of all sources that what is compiled follows from.
    """
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return function
    dispatcher = numba.njit(nogil=True)(function)
    folder = cache_folder(package, numba.config.CACHE_DIR)
    if folder is not None and has_compiler():
        importlib.import_module("dataservice.core.compile_cache").cache_in(folder, dispatcher)
    return cast(Callable[P, T], dispatcher)


@functools.cache
def cache_folder(package: Path, configured: str) -> str | None:
    """A writable folder for what is compiled of a package's sources as they are; None for none.

    Below `configured` (NUMBA_CACHE_DIR), else beside the sources, else in the user's cache.
    """
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(path.read_bytes())
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parents = [Path(configured)] if configured else [package / "__pycache__"]
    if not configured and os.path.isabs(users):  # it is not for a user without a home
        parents.append(Path(users))
    for parent in parents:
        folder = parent / f"dataservice-numba-{sources.hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    return None
