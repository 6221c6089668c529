"""Gloo ranks on this machine for tests: each a process, forked from one that has imported torch.

Invariants: all ranks end with `run_ranks`, by its deadline; when one fails, so do they all.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_ranks(
    work: str, num_ranks: int, folder: Path, *arguments: Any, deadline_s: float = 110.0
) -> list[Any]:
    """What `work(rank, num_ranks, *arguments)` returns on each rank, all of JSON types.

    `work`: "module:function", the module below tests/. The ranks meet and answer in `folder`.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "support.ranks", work, str(num_ranks), str(folder)]
    process = subprocess.Popen(
        [*command, json.dumps(arguments)], env=environment, cwd=ROOT, start_new_session=True
    )
    try:
        assert process.wait(deadline_s) == 0
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _main() -> None:
    from torch import multiprocessing

    module, _, name = sys.argv[1].partition(":")
    work, num_ranks = getattr(importlib.import_module(module), name), int(sys.argv[2])
    given = (work, num_ranks, Path(sys.argv[3]), json.loads(sys.argv[4]))
    multiprocessing.start_processes(_be_rank, given, nprocs=num_ranks, start_method="fork")


def _be_rank(rank: int, work: Any, num_ranks: int, folder: Path, arguments: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    found = work(rank, num_ranks, *arguments)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main()
