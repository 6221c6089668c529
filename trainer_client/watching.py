"""Watches fetches that take long: has the pack gone to another worker meanwhile?

Invariants: the thread is started by the first fetch, ends once `stop` is set and is joined by
`join`; whatever goes wrong in it is left to the fetch's own deadline; a fetch is given up only
where the coordinator names another worker for its pack.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOG = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the fetches under way."""
QUIET_S = 1.0
"""A fetch may take so long before the coordinator is asked; then it is asked again, more and more
rarely, up to SELDOM_S."""
SELDOM_S = 5.0
JOIN_S = 15.0


@dataclass(kw_only=True, slots=True, eq=False)
class Fetch:
    """One pack on its way."""

    step: int
    micro_step: int
    number: int
    """Of the pack in its cell."""
    endpoint: str
    started: float = field(default_factory=time.monotonic)
    ask_at: float = 0.0


class FetchWatch:
    """A worker that is stopped, or whose host is gone, keeps its connections: nothing but the
    coordinator, whose lease it has lost, knows that no more comes."""

    def __init__(
        self,
        stop: threading.Event,
        *,
        name: str,
        is_moved: Callable[[Fetch], bool],
        give_up: Callable[[Fetch], None],
    ) -> None:
        """`is_moved` asks the coordinator; `give_up` makes the fetch raise in its thread."""
        self._stop = stop
        self._is_moved, self._give_up = is_moved, give_up
        self._fetches: set[Fetch] = set()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False

    @contextmanager
    def over(self, fetch: Fetch) -> Iterator[None]:
        fetch.ask_at = fetch.started + QUIET_S
        with self._guard:
            self._fetches.add(fetch)
            if not self._is_started and not self._stop.is_set():
                self._is_started = True
                self._thread.start()
        try:
            yield
        finally:
            with self._guard:
                self._fetches.discard(fetch)

    def join(self) -> None:
        """`stop` must be set."""
        if self._is_started and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                LOG.warning("the thread %s did not end within %g s", self._thread.name, JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            with self._guard:
                quiet = [fetch for fetch in self._fetches if fetch.ask_at <= now]
            for fetch in quiet:
                try:
                    moved = self._is_moved(fetch)
                except Exception as error:
                    LOG.info("%s: %s", self._thread.name, error)
                    moved = False
                waited_s = time.monotonic() - fetch.started
                fetch.ask_at = time.monotonic() + min(SELDOM_S, max(QUIET_S, waited_s / 2))
                with self._guard:
                    moved = moved and fetch in self._fetches
                if moved:
                    LOG.warning(
                        "nothing came from the worker at %s for %.1f s, and its packs have gone "
                        "to others",
                        fetch.endpoint,
                        waited_s,
                    )
                    self._give_up(fetch)
