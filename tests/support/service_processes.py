"""The whole service as real processes of this machine, without Ray, and the keeper that starts
those anew that end.

Invariants: the coordinator's port stays the same over its restarts; a worker that is started anew
has a new worker id under its old name; all processes end with the block.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGTERM
from typing import Any

from dataservice.config import Config, config_to_json
from dataservice.errors import DataServiceError
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus
from support.worker_process import codecs_environment

MAIN = Path(__file__).with_name("service_main.py")
POLL_S = 0.05
PAUSE_S = 0.5
"""A process that ends at once is not started anew sooner."""
START_S = 60.0
STOP_S = 10.0
COORDINATOR = "coordinator"


@dataclass(slots=True)
class _Process:
    role: str
    options: dict[str, Any]
    popen: subprocess.Popen[bytes]
    started: float
    ended: bool = False


class ServiceProcesses:
    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        workers: int = 2,
        nodes: tuple[str, ...] = ("n0",),
        codecs: Sequence[str] = (),
        keep: bool = True,
        port: int | None = None,
        coordinators: Mapping[str, str] | None = None,
        worker_options: Callable[[str], Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`codecs`: kinds of pictures that misbehave; `folder` gets logs and configs; with `keep`,
        whatever ended is started again. `port`: the coordinator's; `coordinators`: where the
        members of a node reach it, such as a proxy's endpoint; `worker_options`: more of Worker's
        arguments, by name of the worker."""
        self.config, self._folder = config, folder
        self.exits: list[tuple[str, int]] = []
        """Name and exit code of those that ended by themselves or by a signal, in order."""
        self._keep = keep
        self._coordinators = {} if coordinators is None else dict(coordinators)
        self._worker_options = worker_options
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if codecs:
            self._environment |= codecs_environment(codecs)
        self._processes: dict[str, _Process] = {}
        self._numbers, self._starts = itertools.count(), itertools.count(1)
        self._lock = threading.RLock()
        self._closing = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._config_file(COORDINATOR).write_text(config_to_json(config))
        self._port = free_port() if port is None else port
        self.endpoint = f"127.0.0.1:{self._port}"
        self._keeper = threading.Thread(target=self._watch, name="keeper")
        try:
            self.start_coordinator()
            if config.staging.cache_dir is not None:
                for node in nodes:
                    self.add_stager(node)
            for number in range(workers):
                self.add_worker(nodes[number % len(nodes)])
            self.wait_until_up()
        except BaseException:
            self.close()
            self._print_logs()
            raise
        self._keeper.start()

    # ---- starting --------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Does not wait until it answers; `wait_until_up` does."""
        self._start(COORDINATOR, "coordinator", {"port": self._port})

    def add_worker(self, node: str = "n0") -> str:
        name = f"worker-{next(self._numbers)}"
        options = {} if self._worker_options is None else dict(self._worker_options(name))
        self._start(name, "worker", self._member(node) | options)
        return name

    def add_stager(self, node: str) -> str:
        """With a cache directory of its own, below the configured one."""
        name = f"stager-{node}"
        staging = self.config.staging
        assert staging.cache_dir is not None
        own = dataclasses.replace(staging, cache_dir=str(Path(staging.cache_dir) / node))
        config = dataclasses.replace(self.config, staging=own)
        self._config_file(name).write_text(config_to_json(config))
        self._start(name, "stager", self._member(node))
        return name

    def _member(self, node: str) -> dict[str, Any]:
        return {"coordinator": self._coordinators.get(node, self.endpoint), "node": node}

    def wait_until_up(self, timeout_s: float = START_S) -> None:
        """Until the coordinator answers and its plan is open."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                if self.status()["state"] != "opening":
                    return
                assert time.monotonic() < until, f"the plan is not open within {timeout_s:g} s"
                time.sleep(POLL_S)
            except DataServiceError as error:
                if time.monotonic() > until:
                    raise AssertionError(
                        f"no coordinator within {timeout_s:g} s: {error}"
                    ) from error
                process = self._processes[COORDINATOR].popen
                if not self._keep and process.poll() is not None:
                    raise AssertionError(f"it ended with {process.returncode}") from error
                time.sleep(POLL_S)

    def _config_file(self, name: str) -> Path:
        own = name if name.startswith("stager") else COORDINATOR
        return self._folder / f"{own}.json"

    def _start(self, name: str, role: str, options: dict[str, Any]) -> None:
        given = options
        if role == "worker":
            given = {**options, "worker_id": f"{name}.{next(self._starts)}"}
        command = [sys.executable, str(MAIN), role, str(self._config_file(name))]
        with self._lock, self._log_file(name).open("ab") as log:
            if self._closing.is_set():
                return
            popen = subprocess.Popen(
                [*command, json.dumps(given)],
                env=self._environment,
                stdin=subprocess.PIPE,
                stderr=log,
            )
            self._processes[name] = _Process(role, options, popen, time.monotonic())

    # ---- what tests do with them -----------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int]:
        """By name, of those that run."""
        with self._lock:
            return {name: p.popen.pid for name, p in self._processes.items() if not p.ended}

    def signal(self, name: str, sig: int) -> int:
        """Returns the pid that got it."""
        with self._lock:
            popen = self._processes[name].popen
            popen.send_signal(sig)
            return popen.pid

    def remove(self, name: str, sig: int = SIGTERM) -> int:
        """Ends it by `sig`, for good; its exit code."""
        with self._lock:
            process = self._processes.pop(name)
        return _end(process.popen, sig)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        with CoordinatorClient(self.endpoint) as client:
            answer: Any = client.call(GetStatus(), timeout_s=timeout_s)
        status: dict[str, Any] = json.loads(answer.status)
        return status

    def log(self, name: str) -> str:
        """All that processes of this name wrote."""
        return self._log_file(name).read_text(errors="replace")

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    # ---- keeping and ending ----------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            with self._lock:
                for name, process in list(self._processes.items()):
                    self._look_after(name, process)

    def _look_after(self, name: str, process: _Process) -> None:
        code = process.popen.poll()
        if code is None:
            return
        if not process.ended:
            process.ended = True
            _close_input(process.popen)
            self.exits.append((name, code))
        if self._keep and time.monotonic() - process.started > PAUSE_S:
            self._start(name, process.role, process.options)

    def __enter__(self) -> ServiceProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:
            self._print_logs()

    def close(self) -> None:
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        with self._lock:
            coordinator = self._processes.pop(COORDINATOR, None)
            members, self._processes = self._processes, {}
        for process in members.values():
            _ask_to_end(process.popen, SIGTERM)
        for process in members.values():
            _end(process.popen, SIGTERM)
        if coordinator is not None:
            _end(coordinator.popen, SIGTERM)

    def _print_logs(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            print(f"---- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


def _ask_to_end(popen: subprocess.Popen[bytes], sig: int) -> None:
    if popen.poll() is None:
        popen.send_signal(sig)
        popen.send_signal(SIGCONT)


def _end(popen: subprocess.Popen[bytes], sig: int) -> int:
    _ask_to_end(popen, sig)
    with suppress(subprocess.TimeoutExpired):
        popen.wait(STOP_S)
    popen.kill()
    popen.wait()
    _close_input(popen)
    return popen.returncode


def _close_input(popen: subprocess.Popen[bytes]) -> None:
    if popen.stdin is not None:
        popen.stdin.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
