"""What each switch of the example trainer costs, on the demo's data: step time and peak memory.

    python benchmarks/train_options.py [--steps N] [--turns N] [--device cpu|cuda] [--ranks N]

The demo's service runs until the first N steps have been read. Then every option trains on them:
all take turns in one process a rank, the first turn, which compiles, is not counted; times are
medians, ratios medians of the ratios within a turn to the plain model under DDP. Peak memory is
that of a process of its own beyond one that trains nothing (of the device on CUDA).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import machine
from measuring import SPAWN, peak_bytes
from reports import aligned

from dataservice.wire.messages import SessionOpened
from trainer_client import MicroBatch, PackStream, ParallelLayout, VisionInfo
from trainer_client.examples.tiny_vlm import ModelOptions, ModelSizes, build_model
from trainer_client.examples.train_tiny_vlm import parallel, train

CONFIG = Path(__file__).resolve().parent.parent / "deploy/demo.yaml"
MICRO_STEPS = 4
LIMIT_S = 900.0
PLAIN = "plain"
OPTIONS: dict[str, tuple[str, ModelOptions]] = {
    PLAIN: ("ddp", ModelOptions()),
    "mask attention": ("ddp", ModelOptions(attention="mask")),
    "compiled tower": ("ddp", ModelOptions(compile="inductor")),
    "selective recomputation": ("ddp", ModelOptions(recompute="selective")),
    "full recomputation": ("ddp", ModelOptions(recompute="full")),
    "groups of 512 patches": ("ddp", ModelOptions(max_patches=512)),
    "no dummy image": ("ddp", ModelOptions(dummy_image=False)),
    "FSDP2": ("fsdp", ModelOptions()),
    "FSDP2, groups, full": ("fsdp", ModelOptions(recompute="full", max_patches=512)),
}
NEEDS_RANKS = ("FSDP2", "FSDP2, groups, full")
NEEDS_ONE_RANK = ("no dummy image",)
"""DDP waits for the gradients of every parameter."""
MODEL = {"dim": 128, "vision_dim": 128, "vision_layers": 4, "layers": 2}


# ---- data ---------------------------------------------------------------------------------------


def read_steps(folder: Path, steps: int, ranks: int) -> tuple[SessionOpened, Path]:
    """The first steps of the demo, in a file of plain types for `load_steps`."""
    from dataservice.actors.launch import running_service
    from dataservice.config import load_config

    os.environ["DEMO_DIR"] = str(folder)
    command = [sys.executable, "-m", "dataservice.cli", "index", str(CONFIG)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    saved = []
    with (
        running_service(load_config(str(CONFIG))) as service,
        PackStream(
            service.endpoint,
            job="demo",
            layout=ParallelLayout(),
            micro_steps=MICRO_STEPS * ranks,
        ) as stream,
    ):
        info = stream.open()
        for batch in stream:
            if batch.step >= steps:
                break
            saved.append((dict(batch), batch.meta))
    path = folder / "batches"
    torch.save(saved, path)
    return info, path


def load_steps(
    path: Path, info: SessionOpened, rank: int, ranks: int, device: str
) -> list[MicroBatch]:
    """A rank's micro-batches: each `ranks`-th of a step."""
    batches = []
    for tensors, meta in torch.load(path, weights_only=True):
        if meta["micro_step"] % ranks != rank:
            continue
        batch = MicroBatch(tensors)
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to(device)
        batch.step, batch.micro_step = meta["step"], meta["micro_step"] // ranks
        batch.is_last_micro_step = batch.micro_step + 1 == MICRO_STEPS
        batch.meta, batch.vision = meta, VisionInfo.of(info)
        batches.append(batch)
    return batches


# ---- training -----------------------------------------------------------------------------------


class Trainer:
    """One option's model and optimizer over the same micro-batches again and again."""

    def __init__(self, name: str, info: SessionOpened, device: str) -> None:
        kind, options = OPTIONS[name]
        plain = build_model(ModelSizes.of(info, **MODEL), options).to(device)
        self.device, self.model = device, parallel(plain, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def turn(self, batches: Sequence[MicroBatch]) -> float:
        """Seconds a step; the slowest rank's."""
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        train(self.model, self.optimizer, batches, after_step=lambda *_: True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor([time.perf_counter() - began], device=self.device)
        if dist.is_initialized():
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item() / (len(batches) / MICRO_STEPS)


def names_for(ranks: int) -> list[str]:
    left_out = NEEDS_RANKS if ranks == 1 else NEEDS_ONE_RANK
    return [name for name in OPTIONS if name not in left_out]


def join_ranks(rank: int, ranks: int, device: str, folder: Path, purpose: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/{purpose}",
            rank=rank,
            world_size=ranks,
        )


def time_rank(rank: int, answer: Any, given: Given) -> None:
    """Sends {option: seconds a step by turn}."""
    join_ranks(rank, given.ranks, given.device, given.path.parent, "times")
    batches = load_steps(given.path, given.info, rank, given.ranks, given.device)
    trainers = {name: Trainer(name, given.info, given.device) for name in names_for(given.ranks)}
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(given.turns + 1):
        for name, trainer in trainers.items():
            seconds = trainer.turn(batches)
            if turn:
                found[name].append(seconds)
    if rank == 0:
        answer.send(found)
    if given.ranks > 1:
        dist.destroy_process_group()


def peak_rank(rank: int, answer: Any, given: Given, name: str) -> None:
    """Sends the most bytes of rank 0; with name "" of one that has the data and no model."""
    join_ranks(rank, given.ranks, given.device, given.path.parent, f"peak {name}")
    batches = load_steps(given.path, given.info, rank, given.ranks, given.device)
    if name:
        Trainer(name, given.info, given.device).turn(batches)
    if rank == 0:
        on_gpu = given.device == "cuda"
        answer.send(torch.cuda.max_memory_allocated() if on_gpu else peak_bytes(os.getpid()))
    if given.ranks > 1:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    info: SessionOpened
    path: Path
    ranks: int
    turns: int
    device: str


def in_ranks(target: Any, given: Given, *arguments: Any) -> Any:
    """What rank 0 of new processes sends."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    processes = [
        SPAWN.Process(target=target, args=(rank, theirs, given, *arguments))
        for rank in range(given.ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise SystemExit(f"the ranks gave no result within {LIMIT_S:g} s")
        found = ours.recv()
        for process in processes:
            process.join(30)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def table(given: Given) -> list[str]:
    times = in_ranks(time_rank, given)
    least = in_ranks(peak_rank, given, "")
    rows = [["", "ms a step", "x plain", "peak MB"]]
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[PLAIN], strict=True)]
        peak = in_ranks(peak_rank, given, name) - least
        cells = (1e3 * statistics.median(seconds), statistics.median(ratios), peak / 1e6)
        rows.append([name, f"{cells[0]:.0f}", f"{cells[1]:.2f}", f"{cells[2]:.0f}"])
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print(f"machine:  {machine()}")
    print(f"versions: Python {platform.python_version()}, torch {torch.__version__}")
    print(f"command:  python benchmarks/train_options.py {' '.join(sys.argv[1:])}".rstrip())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="opt-", ignore_cleanup_errors=True) as name:
            info, path = read_steps(Path(name), args.steps, ranks)
            given = Given(info=info, path=path, ranks=ranks, turns=args.turns, device=args.device)
            lines = table(given)
        each = "rank" if ranks == 1 else "ranks"
        print(f"\n{ranks} {each}, {args.steps} steps of {MICRO_STEPS} micro-steps")
        print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
