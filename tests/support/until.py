"""Waits of tests: for what should come to be, and no longer than it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

POLL_S = 0.05


def until(what: str, found: Callable[[], T], timeout_s: float = 60.0) -> T:
    """What `found` returns once it is true; AssertionError says what did not come."""
    started = time.monotonic()
    while True:
        if result := found():
            return result
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


class HasStatus(Protocol):
    def status(self) -> dict[str, Any]: ...


def workers_of(service: HasStatus) -> list[dict[str, Any]]:
    """Those that the coordinator knows; none while it is opening."""
    found: list[dict[str, Any]] = service.status().get("workers", [])
    return found
