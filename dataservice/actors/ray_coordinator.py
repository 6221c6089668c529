"""The coordinator's actor as its supervisor sees it: started, asked, killed, started again.

Invariants: the first start chooses the port, each later one takes the same; of one whose process
may still run there is never a second: it is killed by its process id before the next one starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataservice.actors.ray_actors import CoordinatorActor
from dataservice.config import Config, config_to_json
from dataservice.errors import DeadlineExceeded, ServiceUnavailable
from dataservice.obs.logs import Logs

_LOG = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
POLL_S = 0.2
PROBE_S = 2.0
NODE_POLL_S = 2.0
END_S = 5.0
"""A killed process is gone by then."""
ASKED_S = 2.0
"""For which Ray may end a process; it says a word about one that was killed."""


class CoordinatorEnded(ServiceUnavailable):
    """The actor's process has ended, or says nothing any more."""


class NodeLost(ServiceUnavailable):
    """Nothing can be started on this machine's node any more."""


class RayCoordinator:
    """Safe across threads, but for `start` and `kill`, which one thread calls."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._handle: Any = None
        self._endpoint = ""
        self._http_port: int | None = None
        self._process: _Process | None = None

    @property
    def endpoint(self) -> str:
        """ "" before the first start."""
        return self._endpoint

    @property
    def http_port(self) -> int | None:
        """Of the status page; None without one."""
        return self._http_port

    @property
    def page_url(self) -> str:
        """Of the status page; "" without one."""
        if self._http_port is None:
            return ""
        scheme = "http" if self._config.serving.tls is None else "https"
        return f"{scheme}://{self.endpoint.rpartition(':')[0]}:{self._http_port}/"

    @property
    def is_up(self) -> bool:
        process = self._process
        return self._handle is not None and process is not None and not process.has_ended()

    def start(self, given_up: Callable[[], bool]) -> None:
        """Returns when it answers; raises what it refused to start with, CoordinatorEnded when its
        process ended, NodeLost, DeadlineExceeded, and ServiceUnavailable once `given_up`."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
        remote: Any = ray.remote(**options)(CoordinatorActor)
        logs = Logs.from_environment(job=self._config.job)
        handle = remote.remote(config_to_json(self._config), logs)
        port = int(self.endpoint.rpartition(":")[2]) if self.endpoint else None
        try:
            self._process = None
            self._process = _Process(self._answer(handle.pid.remote(), given_up))
            started = handle.start.remote(port, self._http_port)
            self._endpoint, self._http_port = self._answer(started, given_up)
        except BaseException:
            self._end(handle)
            raise
        self._handle = handle

    def _answer(self, reference: Any, given_up: Callable[[], bool]) -> Any:
        until = time.monotonic() + START_TIMEOUT_S
        look = time.monotonic() + NODE_POLL_S
        while not ray.wait([reference], timeout=POLL_S)[0]:
            if given_up():
                raise ServiceUnavailable("stopped before the coordinator was up")
            if self._process is not None and self._process.has_ended():
                raise CoordinatorEnded("the coordinator ended while it started")
            if time.monotonic() > look:
                check_node()
                look = time.monotonic() + NODE_POLL_S
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"the coordinator did not start within {START_TIMEOUT_S:g} s"
                )
        return _result(reference)

    def changed(self) -> Any:
        """An object reference that is done when the fleet should be looked at, or the actor is
        gone."""
        return self._alive().fleet_changed.remote()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the actor's `method` returns; CoordinatorEnded, or what it raised."""
        reference = getattr(self._alive(), method).remote(*arguments)
        until = time.monotonic() + timeout_s
        while not ray.wait([reference], timeout=POLL_S)[0]:
            self._alive()
            if time.monotonic() > until:
                raise CoordinatorEnded(f"the coordinator has not answered for {timeout_s:g} s")
        return _result(reference)

    def _alive(self) -> Any:
        handle = self._handle
        if handle is None or not self.is_up:
            raise CoordinatorEnded("the coordinator has ended")
        return handle

    def kill(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._end(handle)

    def _end(self, handle: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(handle)
        if self._process is not None:
            self._process.kill(ASKED_S)  # Ray asks it to end, and one that is stopped does not


def check_node() -> None:
    """Raises NodeLost once Ray holds the node of this process for dead; asks Ray's head."""
    here = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == here and node["Alive"] for node in ray.nodes()):
        raise NodeLost(
            "the Ray node of this machine has ended (its raylet was killed, stopped, or cut off "
            "from the head), and the coordinator with it; serve again with the same state_dir and "
            "port, after `ray start` where the cluster is not serve's own: trainers that still "
            "wait go on, others resume from their saved states"
        )


def head_answers() -> bool:
    """Whether somebody listens where Ray's head is; does not wait for Ray."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=POLL_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise CoordinatorEnded(f"the coordinator has ended: {words[0]}") from None


class _Process:
    """Of this machine; its descriptor tells it from a later one with the same id. Safe across
    threads."""

    def __init__(self, pid: int) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._ended = False
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True
        except OSError as error:  # some sandboxes have none: then Ray alone tells of its end
            _LOG.warning("the coordinator's process %d cannot be watched: %s", pid, error)

    def has_ended(self) -> bool:
        """Known at once, also while Ray has lost its head."""
        with self._lock:
            return self._ended or (self._descriptor >= 0 and self._wait(0.0))

    def kill(self, grace_s: float) -> None:
        """Unless it ends within `grace_s`; waits END_S for its end."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._wait(grace_s)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            self._wait(END_S)
            os.close(self._descriptor)
            self._descriptor, self._ended = -1, True

    def _wait(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
