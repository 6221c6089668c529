"""The coordinator's actor as its supervisor sees it: started, asked, killed, started again.

Invariants: the first start chooses the port, each later one takes the same; of one whose process
may still run there is never a second: it is killed by its process id before the next one starts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataservice.actors.ray_actors import CoordinatorActor
from dataservice.config import Config, config_to_json
from dataservice.errors import DeadlineExceeded, ServiceUnavailable

START_TIMEOUT_S = 300.0
POLL_S = 0.2
END_S = 5.0
"""A killed process is gone by then."""


class CoordinatorEnded(ServiceUnavailable):
    """The actor's process has ended, or says nothing any more."""


class RayCoordinator:
    """Safe across threads, but for `start` and `kill`, which one thread calls."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._handle: Any = None
        self._endpoint = ""
        self._process: _Process | None = None

    @property
    def endpoint(self) -> str:
        """ "" before the first start."""
        return self._endpoint

    def start(self, given_up: Callable[[], bool]) -> None:
        """Returns when it answers; raises what it refused to start with, CoordinatorEnded when its
        process ended, DeadlineExceeded, and ServiceUnavailable once `given_up`."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(num_cpus=0, scheduling_strategy=here)(CoordinatorActor)
        handle = remote.remote(config_to_json(self._config))
        port = int(self.endpoint.rpartition(":")[2]) if self.endpoint else None
        try:
            self._process = _Process.of(self._answer(handle.pid.remote(), given_up))
            self._endpoint = self._answer(handle.start.remote(port), given_up)
        except BaseException:
            self._end(handle)
            raise
        self._handle = handle

    def _answer(self, reference: Any, given_up: Callable[[], bool]) -> Any:
        until = time.monotonic() + START_TIMEOUT_S
        while not ray.wait([reference], timeout=POLL_S)[0]:
            if given_up():
                raise ServiceUnavailable("stopped before the coordinator was up")
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"the coordinator did not start within {START_TIMEOUT_S:g} s"
                )
        return _result(reference, POLL_S)

    def changed(self) -> Any:
        """An object reference that is done when the fleet should be looked at, or the actor is
        gone."""
        return self._alive().fleet_changed.remote()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the actor's `method` returns; CoordinatorEnded, or what it raised."""
        return _result(getattr(self._alive(), method).remote(*arguments), timeout_s)

    def _alive(self) -> Any:
        handle = self._handle
        if handle is None:
            raise CoordinatorEnded("the coordinator has ended and is being started again")
        return handle

    def kill(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._end(handle)

    def _end(self, handle: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(handle)
        if self._process is not None:
            self._process.kill(END_S)  # Ray asks the process to end, and a stopped one does not
            self._process = None


def _result(reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.GetTimeoutError:
        raise CoordinatorEnded(f"the coordinator has not answered for {timeout_s:g} s") from None
    except ray.exceptions.RayError as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise CoordinatorEnded(f"the coordinator has ended: {words[0]}") from None


@dataclass(frozen=True, slots=True)
class _Process:
    """Of this machine; told from a later one with the same id by a descriptor of it."""

    pid: int
    descriptor: int

    @classmethod
    def of(cls, pid: int) -> _Process | None:
        try:
            return cls(pid, os.pidfd_open(pid))
        except OSError:
            return None  # ended meanwhile, or in another container

    def kill(self, timeout_s: float) -> None:
        try:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            waiting = select.poll()
            waiting.register(self.descriptor, select.POLLIN)
            waiting.poll(timeout_s * 1000)
        finally:
            os.close(self.descriptor)
