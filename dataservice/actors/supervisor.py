"""Keeps a service running: its coordinator, which is started again when it ends, and its fleet.

Invariants: it runs where the service was started, in a thread of its own, and owns all actors, so
that none ends with another; a coordinator that ends again and again, or that another has taken the
job from, ends the service with an error that says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dataservice.actors.fleet_view import KEEP_S, FleetNews, FleetView
from dataservice.actors.ray_coordinator import (
    CoordinatorEnded,
    NodeLost,
    RayCoordinator,
    head_answers,
)
from dataservice.actors.ray_fleet import RayFleet
from dataservice.config import Config
from dataservice.errors import DataServiceError, ServiceUnavailable

_LOG = logging.getLogger(__name__)

SILENT_S = 30.0
"""A coordinator that does not answer for so long is killed and started again; one that can still
say where it stands does so before."""
QUICK_S = 60.0
"""A coordinator that ends sooner after its start has ended quickly."""
MOST_QUICK_ENDS = 5
"""In a row; after one more the service ends."""
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Before each start again, by the quick ends in a row."""
HEAD_S = 15.0
"""Ray's head is lost when it does not answer for so long, and the coordinator is down."""
HEAD_LOST = "the head of the Ray cluster does not answer"
AFTER_HEAD_LOST = (
    "start a cluster and serve again with the same state_dir and port: trainers that still wait go "
    "on, others resume from their saved states"
)
STOP_TIMEOUT_S = 10.0


class Supervisor:
    def __init__(self, config: Config, *, own_ray: bool) -> None:
        self.coordinator = RayCoordinator(config)
        self.failure: DataServiceError | None = None
        """Why the service has ended, once it has."""
        self.head_lost = False
        self.restarts = 0
        """Of the coordinator."""
        self._config = config
        self._own_ray = own_ray
        self._fleet: RayFleet | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._quick_ends = 0
        self._head_silent_since: float | None = None
        self._up_since: float | None = None
        """Monotonic; None while the coordinator is down."""

    def start(self, given_up: Callable[[], bool] = lambda: False) -> str:
        """Returns the endpoint, which stays; raises what the coordinator refused to start with, and
        ServiceUnavailable once `given_up`."""
        self.coordinator.start(given_up)
        self._up_since = time.monotonic()
        self._fleet = RayFleet(self._config, self.coordinator.endpoint, own_ray=self._own_ray)
        self._thread.start()
        return self.coordinator.endpoint

    def check(self) -> None:
        """Raises what has ended the service; warns of the loss of Ray's head, and raises
        ServiceUnavailable once the coordinator is down besides."""
        if self.failure is None:
            self._check_head()
        if self.failure is not None:
            raise self.failure

    def _check_head(self) -> None:
        """Ray's own calls would wait for it, until Ray ends this process without a word of ours."""
        now = time.monotonic()
        if head_answers():
            self._head_silent_since = None
        elif self._head_silent_since is None:
            self._head_silent_since = now
            _LOG.warning("%s; unless it is back soon, %s", HEAD_LOST, AFTER_HEAD_LOST)
        elif now - self._head_silent_since > HEAD_S and not self.coordinator.is_up:
            self.failure, self.head_lost = (
                ServiceUnavailable(f"{HEAD_LOST} and the coordinator has ended; {AFTER_HEAD_LOST}"),
                True,
            )

    def stop(self) -> None:
        """No more steps are handed out; then the actors end: workers and stagers first, when what
        clients were waiting for is with them, and the coordinator last."""
        self._stopping.set()
        if self.head_lost:
            self._thread.join(1.0)  # it may wait for Ray
            return  # the actors ended with the head, or will
        if self._thread.is_alive():
            self._thread.join(2 * SILENT_S)
        if self._fleet is None:
            return
        try:
            answers = self._tell_to("wind_down")
            self._fleet.stop()
            if answers:
                self._tell_to("stop")
        finally:
            self.coordinator.kill()

    def _tell_to(self, method: str) -> bool:
        """Whether it did."""
        try:
            self.coordinator.call(method, timeout_s=STOP_TIMEOUT_S)
        except CoordinatorEnded as error:
            _LOG.warning("%s", error)
            return False
        return True

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._keep()
        except DataServiceError as error:
            _LOG.error("the service has ended: %s", error)
            self.failure = error

    def _keep(self) -> None:
        assert self._fleet is not None
        try:
            if not self.coordinator.is_up:
                raise CoordinatorEnded("the coordinator has ended")
            self._fleet.keep(self._tell)
            self._fleet.wait_for_news(self.coordinator.changed(), KEEP_S)
        except CoordinatorEnded as ended:
            self._start_again(ended)
        except DataServiceError:
            raise
        except Exception:
            _LOG.exception("the fleet could not be looked after; trying again")
            self._stopping.wait(KEEP_S)

    def _tell(self, news: FleetNews) -> FleetView:
        view: FleetView = self.coordinator.call("fleet", news, timeout_s=SILENT_S)
        return view

    def _start_again(self, ended: Exception) -> None:
        """Raises once it has ended too often, or its node has."""
        assert self._fleet is not None
        while not self._stopping.is_set():
            self.coordinator.kill()
            if self._up_since is not None and time.monotonic() - self._up_since > QUICK_S:
                self._quick_ends = 0
            self._up_since = None
            if self._quick_ends == MOST_QUICK_ENDS:
                raise DataServiceError(
                    f"the coordinator was started again {MOST_QUICK_ENDS} times and never lived "
                    f"for {QUICK_S:g} s; the last time: {ended}. Its journal is as it left it: "
                    "once the cause is mended, serve again with the same state_dir"
                ) from ended
            _LOG.warning("%s; it is started again", ended)
            self._stopping.wait(PAUSES_S[self._quick_ends])
            self._quick_ends += 1
            try:
                self.coordinator.start(self._stopping.is_set)
            except NodeLost:
                raise
            except Exception as error:
                ended = error
                continue
            self._up_since = time.monotonic()
            self._fleet.expect_anew()
            self.restarts += 1
            return
