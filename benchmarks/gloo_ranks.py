"""Gloo ranks of this machine, each a process started afresh, with a deadline for all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from measuring import SPAWN

Main = Callable[..., Any]


def _rank(
    main: Main, rank: int, ranks: int, store: str, answer: Any, given: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    answer.send(main(rank, ranks, *given))
    dist.destroy_process_group()


class Ranks:
    """`main(rank, ranks, *given)` in each; `results` waits for what they return."""

    def __init__(self, main: Main, ranks: int, *given: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes = [SPAWN.Pipe(duplex=False) for _ in range(ranks)]
        store = f"{self._folder.name}/store"
        self.processes: list[BaseProcess] = [
            SPAWN.Process(target=_rank, args=(main, rank, ranks, store, pipe[1], given))
            for rank, pipe in enumerate(self._pipes)
        ]
        for process in self.processes:
            process.start()
        for _, ours in self._pipes:
            ours.close()  # so that a rank that died is an end of file

    @property
    def running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def results(self, timeout_s: float) -> list[Any]:
        found = []
        for rank, (pipe, _) in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                raise SystemExit(f"rank {rank} gave no result within {timeout_s:g} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"rank {rank} ended without a result") from None
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_exc: object) -> None:
        for process in self.processes:
            process.join(10 if _exc[0] is None else 0)
            process.kill()
            process.join()
        self._folder.cleanup()


@contextmanager
def served_elsewhere(serve: Callable[..., None], *given: Any) -> Any:
    """`serve(answer, stop, *given)` in a process of its own; what it sends first, its process.

    `serve` returns when `stop` is set.
    """
    ours, theirs = SPAWN.Pipe(duplex=False)
    stop = SPAWN.Event()
    process = SPAWN.Process(target=serve, args=(theirs, stop, *given))
    process.start()
    theirs.close()
    try:
        if not ours.poll(120):
            raise SystemExit("the service did not start within 120 s")
        try:
            first = ours.recv()
        except EOFError:
            raise SystemExit("the service ended before it was up") from None
        yield first, process
    finally:
        stop.set()
        process.join(60)
        process.kill()
        process.join()
