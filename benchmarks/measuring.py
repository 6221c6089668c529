"""Work measured in processes of its own: started together, each on the cores it is given."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 1800.0
"""Of one measurement."""
Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    seconds: float
    cpu_s: float
    """Of the processes that decode."""
    peak_bytes: int
    """Of those processes together, resident."""


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def in_processes(
    make: Callable[..., Work], arguments: Sequence[tuple[Any, ...]], cores: Sequence[Sequence[int]]
) -> Measured:
    """One process for each of `arguments`, on the cores of the same place in `cores`.

    `make(*arguments)` prepares and warms up; the work it returns is what is measured, from when all
    are prepared until the last has ended.
    """
    barrier = SPAWN.Barrier(len(arguments))
    pipes = [SPAWN.Pipe(duplex=False) for _ in arguments]
    processes = [
        SPAWN.Process(target=_run, args=(make, given, on, barrier, pipe[1]))
        for given, on, pipe in zip(arguments, cores, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, ours in pipes:
        ours.close()  # so that a process that died is an end of file
    try:
        answers = [_answer(pipe) for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    began, ended, cpu_s, peaks = zip(*answers, strict=True)
    return Measured(seconds=max(ended) - min(began), cpu_s=sum(cpu_s), peak_bytes=sum(peaks))


def _answer(pipe: Any) -> tuple[float, float, float, int]:
    try:
        if pipe.poll(LIMIT_S):
            return pipe.recv()
    except EOFError:
        raise SystemExit("a measuring process ended without a result") from None
    raise SystemExit(f"a measuring process gave no result within {LIMIT_S:g} s")


def _run(
    make: Callable[..., Work], given: tuple[Any, ...], on: Sequence[int], barrier: Any, answer: Any
) -> None:
    os.sched_setaffinity(0, on)
    work = make(*given)
    barrier.wait(LIMIT_S)
    began, cpu = time.monotonic(), time.process_time()
    work()
    ended, used = time.monotonic(), time.process_time() - cpu
    answer.send((began, ended, used, peak_bytes(os.getpid())))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
