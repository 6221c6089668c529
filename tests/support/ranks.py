"""A script run as several gloo ranks: each a process, all ended by a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def run_ranks(
    script: str, num_ranks: int, folder: Path, *arguments: str, timeout_s: float = 110.0
) -> list[Any]:
    """What each rank gave to `finish_rank`; the script gets RANK NUM_RANKS FOLDER and the rest."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(num_ranks), str(folder), *arguments],
            env=environment,
            cwd=ROOT,
        )
        for rank in range(num_ranks)
    ]
    try:
        assert [process.wait(timeout_s) for process in processes] == [0] * num_ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def begin_rank() -> tuple[int, int, Path]:
    """(rank, number of ranks, folder) of this process, its default group initialised."""
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    return rank, num_ranks, folder


def finish_rank(rank: int, folder: Path, result: Any) -> None:
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(result))
