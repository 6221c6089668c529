"""Workers in processes of their own without Ray, and the keeper that replaces those that end."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CODECS = Path(__file__).parent / "codecs"
POLL_S = 0.1
MOST_STARTS = 8
"""Workers that end at once are not replaced for ever."""


def codecs_environment(kinds: Sequence[str]) -> dict[str, str]:
    """Environment variables of processes in which pictures of these kinds misbehave."""
    path = os.pathsep.join(filter(None, [str(CODECS), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "TEST_CODECS": ",".join(kinds)}


class WorkerProcesses:
    """Keeps `count` of them running until it is closed; `exits` are the codes of those that ended
    by themselves, in order."""

    def __init__(
        self,
        endpoint: str,
        *,
        count: int,
        memory_bytes: int | None,
        codecs: Sequence[str],
        folder: Path,
        dies: tuple[str, int] | None = None,
    ) -> None:
        """`codecs`: kinds of pictures that misbehave; `folder` gets the log; `dies`: where the
        first worker kills itself, a key of DEATHS, and after how many times there."""
        self.exits: list[int] = []
        self._command = [sys.executable, __file__, "--coordinator", endpoint]
        if memory_bytes is not None:
            self._command += ["--memory-bytes", str(memory_bytes)]
        self._dies = dies
        self._environment = {**os.environ, **codecs_environment(codecs)}
        self._log = (folder / "workers.log").open("ab")
        self._started = 0
        self._closing = threading.Event()
        self._running = [self._start() for _ in range(count)]
        self._keeper = threading.Thread(target=self._keep, name="keeper")
        self._keeper.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        command = [*self._command, "--worker-id", f"process-{self._started}"]
        if self._dies is not None and self._started == 1:
            command += ["--dies", self._dies[0], "--after", str(self._dies[1])]
        return subprocess.Popen(
            command,
            env=self._environment,
            stderr=self._log,
        )

    def _keep(self) -> None:
        while not self._closing.wait(POLL_S):
            for i, process in enumerate(self._running):
                if process.poll() is not None and self._started < MOST_STARTS:
                    self.exits.append(process.returncode)
                    self._running[i] = self._start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing.set()
        self._keeper.join()
        for process in self._running:
            process.terminate()
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        self._log.close()
        if kind is not None:
            print(Path(self._log.name).read_text()[-5000:])


def _before(owner: Any, name: str, die: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        die()
        return call(*args, **kwargs)

    setattr(owner, name, dying)


def _behind(owner: Any, name: str, die: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        die()
        return result

    setattr(owner, name, dying)


def _in_stream(owner: Any, name: str, die: Callable[[], None]) -> None:
    frames = getattr(owner, name)

    def dying(self: Any) -> Any:
        for frame in frames(self):
            yield frame
            die()

    setattr(owner, name, dying)


DEATHS: dict[str, tuple[str, str, str, Callable[[Any, str, Callable[[], None]], None]]] = {
    "before a build": ("dataservice.actors.worker_tools", "WorkerTools", "build", _before),
    "behind a decode": ("dataservice.actors.worker_tools", "WorkerTools", "build", _behind),
    "before a reply": ("dataservice.actors.worker", "Worker", "taken", _before),
    "in a stream": ("dataservice.wire.encoded", "EncodedPack", "frames", _in_stream),
}
"""Where a worker may kill itself: module, class and method, and when."""


def _kill_itself(where: str, after: int) -> None:
    module, owner, name, change = DEATHS[where]
    times = itertools.count(1)

    def die() -> None:
        if next(times) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    change(getattr(importlib.import_module(module), owner), name, die)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--dies", choices=DEATHS)
    parser.add_argument("--after", type=int)
    options = parser.parse_args()
    from dataservice.actors import worker_memory
    from dataservice.actors.worker import Worker

    logging.basicConfig(level="INFO", format="%(asctime)s %(process)d %(name)s: %(message)s")
    if options.memory_bytes is not None:
        worker_memory.install(options.memory_bytes)
    if options.dies is not None:
        _kill_itself(options.dies, options.after)
    worker = Worker(coordinator=options.coordinator, worker_id=options.worker_id, node="n0")
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    asyncio.run(worker.run())


if __name__ == "__main__":
    main()
