"""Runs a trainer's example several times in one process, on the CPU: `run_trainer.py MODULE RUNS`.

`RUNS` is JSON, a list of argument lists.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(module: str, runs: list[list[str]]) -> None:
    if module == "train_torchtitan":
        from support import titan_on_cpu

        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": "0"})
        titan_on_cpu.prepare()
    if module == "train_deepspeed":
        import deepspeed

        # Its own reduction for CPUs takes a compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    example = importlib.import_module(f"trainer_client.examples.{module}")
    for arguments in runs:
        example.main(arguments)
        if module == "train_torchtitan":
            dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
