"""Gloo ranks on this machine for tests that are their own ranks' script.

Invariants: torch is imported once and the ranks are forked from there; all end with `run_ranks`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(script: str, *arguments: object, deadline_s: float = 100) -> None:
    """Runs the test file `script`, whose main part calls `be_ranks`, in a process of its own."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, str(Path(root) / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, script, *map(str, arguments)]
    process = subprocess.Popen(command, env=environment, cwd=root, start_new_session=True)
    try:
        assert process.wait(deadline_s) == 0
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def be_ranks(work: Callable[..., None], num_ranks: int, folder: Path, *arguments: Any) -> None:
    """`work(rank, folder, *arguments)` in each rank of a gloo group; raises what one did."""
    from torch import multiprocessing

    given = (work, num_ranks, folder, arguments)
    multiprocessing.start_processes(_be_rank, given, nprocs=num_ranks, start_method="fork")


def _be_rank(
    rank: int, work: Callable[..., None], num_ranks: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    work(rank, folder, *arguments)
    dist.destroy_process_group()
