"""Runs a loader in a process of its own and watches it: speed, memory, CPU time, first batch.

Invariants: nothing looks at the run's processes between the first and the last batch of the
measurement; none of them is left when `run` returns.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.environments import environment
from peers.run import Measure
from peers.watch import Tree
from peers.work import PACK_LENGTH, Setup

LIMIT_S = 240.0
"""Of a run, from its start."""
EXIT_S = 30.0
LOOK_S = 0.5
LOOK_AFTER_S = 0.1


class RunFailed(Exception):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Of one run."""

    samples_per_s: float
    images_per_s: float
    seconds: float
    """Of the measurement."""
    fill: float
    """Share of its packs that is not padding."""
    cpu_s: float
    """Of all processes of the run, in the measurement."""
    images: int
    peak_bytes: int
    """PSS of all processes, the most that was seen before and after the measurement."""
    first_s: float
    """From when the trainer started to its first batch; the service was up by then."""
    start_s: float
    """From the start of the run's process, imports and service and all, to the first batch."""

    @property
    def cores(self) -> float:
        return self.cpu_s / self.seconds

    @property
    def cpu_ms_per_image(self) -> float:
        return 1000 * self.cpu_s / max(1, self.images)


Event = dict[str, Any]


def run(setup: Setup, how: Measure, *, python: Path, log: Path) -> Result:
    """Raises RunFailed with what its log says."""
    seen: dict[str, Event] = {}
    cpu: dict[str, float] = {}
    with _started(setup, how, python, log) as (process, pipe):
        spawned, tree = time.monotonic(), Tree(process.pid)
        try:
            for event in _events(pipe, process, tree, spawned + LIMIT_S, seen, log):
                if event["event"] in ("begin", "end"):
                    cpu[event["event"]] = tree.cpu_seconds()
            _wait(process)
        finally:
            tree.kill()
            process.wait()
    if "end" not in seen:
        raise RunFailed(f"it ended without a result: {_tail(log)}")
    end = seen["end"]
    return Result(
        samples_per_s=end["samples"] / end["seconds"],
        images_per_s=end["images"] / end["seconds"],
        seconds=end["seconds"],
        fill=end["tokens"] / (end["packs"] * PACK_LENGTH),
        cpu_s=cpu["end"] - cpu["begin"],
        images=end["images"],
        peak_bytes=tree.peak_bytes,
        first_s=seen["first"]["at"] - seen["started"]["at"],
        start_s=seen["first"]["at"] - spawned,
    )


def digests(setup: Setup, passes: float, *, python: Path, log: Path) -> tuple[set[int], set[int]]:
    """Of all pictures' patches and of all documents that a loader delivers in so many passes."""
    how = Measure(seconds=0, warm_passes=passes, after_s=0, check=True)
    seen: dict[str, Event] = {}
    with _started(setup, how, python, log) as (process, pipe):
        tree = Tree(process.pid)
        try:
            for _ in _events(pipe, process, tree, time.monotonic() + LIMIT_S, seen, log):
                pass
            _wait(process)
        finally:
            tree.kill()
            process.wait()
    if "digests" not in seen:
        raise RunFailed(f"it ended without digests: {_tail(log)}")
    return set(seen["digests"]["pictures"]), set(seen["digests"]["documents"])


@contextmanager
def _started(
    setup: Setup, how: Measure, python: Path, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the pipe where it says what happens."""
    here, there = os.pipe()
    command = [str(python), "-m", "peers.run", setup.to_json(), how.to_json(), str(there)]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, env=environment(), stdout=out, stderr=out, pass_fds=[there]
        )
    os.close(there)
    try:
        yield process, here
    finally:
        os.close(here)


def _events(
    pipe: int,
    process: subprocess.Popen[bytes],
    tree: Tree,
    deadline: float,
    seen: dict[str, Event],
    log: Path,
) -> Iterator[Event]:
    """Until the pipe closes or the run says that it is done; looks at the memory in between."""
    rest = b""
    while "closed" not in seen:
        quiet = "begin" in seen and "end" not in seen
        wait_s = LOOK_AFTER_S if "end" in seen else LOOK_S
        if not select.select([pipe], [], [], wait_s)[0]:
            if time.monotonic() > deadline:
                raise RunFailed(f"not done after {LIMIT_S:g} s: {_tail(log)}")
            if process.poll() is not None:
                return
            if not quiet:
                tree.look()
            continue
        data = os.read(pipe, 1 << 20)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            seen[event["event"]] = event
            yield event


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        return


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-600:] or "its log is empty"
