"""The threads that copy for a staging area."""

from __future__ import annotations

import logging
import threading
import time

from dataservice.storage.staging.area import StagingArea

_LOG = logging.getLogger(__name__)

_IDLE_S = 0.5


class Copiers:
    """Run from the start until `close`; small shards are copied side by side, one a thread."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self._threads = [
            threading.Thread(target=self._run, name=f"stager-copy-{number}")
            for number in range(area.streams)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Stops the area and ends the threads."""
        self._area.stop()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Copiers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._area.stopped:
            try:
                busy = self._area.step()
            except Exception:
                _LOG.exception("staging failed; packs are read from their origin meanwhile")
                busy = False
            if not busy:
                self._area.wait(_IDLE_S)
