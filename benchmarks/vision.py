"""The vision helpers: peak memory and time in groups, balance and speed among ranks.

python benchmarks/vision.py [--patches N] [--turns N] [--device cpu|cuda]

groups   a ViT forward and backward over images of N patches in all: in one go and in groups up
         to a limit, with recomputation and without. Each row runs in a process of its own,
         rows take turns; peak memory is what a process had at most beyond what it had before
         (of the device on CUDA)
shares   the costliest rank's share over the mean, of packs of images: as `share_images` deals
         them, and cut in their order into parts of equally many images
ranks    the same ViT by `cp_forward` on 1 and 2 gloo ranks of one thread each, on the CPU
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import Figure, machine, show, show_reached
from gloo_ranks import Ranks
from measuring import SPAWN, peak_bytes
from reports import aligned
from torch import Tensor

from trainer_client.examples.tiny_vlm import ModelOptions, ModelSizes, VisionTower
from trainer_client.vision import P_REF, chunked_forward, cp_forward, share_images

SIZES = ModelSizes(
    vocab_size=1,
    image_token=0,
    pack_length=1,
    patch=14,
    merge=2,
    temporal_patch=1,
    dim=128,
    vision_dim=128,
    vision_layers=4,
)
LIMITS = (4096, 1024)
LEAST_SAVING = 4.0
MOST_IMBALANCE = 1.1
LIMIT_S = 600.0


def images(patches: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Grids of at most 1,024 patches a picture, together at least `patches`."""
    rng = np.random.Generator(np.random.Philox(seed))
    made: list[tuple[int, int, int]] = []
    while sum(t * h * w for t, h, w in made) < patches:
        height, width = (2 * int(side) for side in rng.integers(2, 17, 2))
        made.append((1, height, width))
    return made


def inputs(patches: int, device: str) -> tuple[VisionTower, Tensor, Tensor]:
    torch.manual_seed(0)
    tower = VisionTower(SIZES, ModelOptions()).to(device)
    grid = torch.tensor(images(patches), device=device)
    return tower, torch.randn(int(grid.prod(dim=1).sum()), tower.num_values, device=device), grid


# ---- groups -------------------------------------------------------------------------------------


def group_run(answer: Any, patches: int, device: str, limit: int, recompute: bool) -> None:
    torch.set_num_threads(1)
    tower, pixels, grid = inputs(patches, device)
    small = grid[:1], pixels[: int(grid[0].prod())]
    tower(small[1], small[0]).sum().backward()  # what is made once
    before = _held(device)
    began = time.perf_counter()
    made = chunked_forward(tower, pixels, grid, max_patches=limit, recompute=recompute)
    assert isinstance(made, Tensor)
    made.square().sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    answer.send((seconds, _peak(device) - before))


def _held(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes(os.getpid())


def in_process(target: Any, *arguments: Any) -> Any:
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise SystemExit(f"a measuring process gave no result within {LIMIT_S:g} s")
        return ours.recv()
    finally:
        process.kill()
        process.join()


def groups(patches: int, turns: int, device: str) -> list[Figure]:
    rows = [("in one go", patches * 2, False)]
    for limit in LIMITS:
        rows += [(f"groups of {limit:,}, kept", limit, False)]
        rows += [(f"groups of {limit:,}, recomputed", limit, True)]
    found: dict[str, list[tuple[float, int]]] = {name: [] for name, *_ in rows}
    for _ in range(turns):
        for name, limit, recompute in rows:
            found[name].append(in_process(group_run, patches, device, limit, recompute))
    whole = found["in one go"]
    table = [["", "seconds", "x one go", "peak MB", "one go x"]]
    savings = []
    for name, *_ in rows:
        pairs = list(zip(found[name], whole, strict=True))
        slower = statistics.median(a[0] / b[0] for a, b in pairs)
        savings.append(statistics.median(b[1] / max(1, a[1]) for a, b in pairs))
        seconds = statistics.median(s for s, _ in found[name])
        peak = statistics.median(p for _, p in found[name]) / 1e6
        cells = [f"{seconds:.2f}", f"{slower:.2f}", f"{peak:.0f}", f"{savings[-1]:.1f}"]
        table.append([name, *cells])
    print("\n".join(aligned(table)))
    return [
        Figure(
            name="peak memory in one go over groups of 1,024, recomputed",
            value=savings[-1],
            unit="x",
            target=f"at least {LEAST_SAVING:g}",
            reached=savings[-1] >= LEAST_SAVING,
        )
    ]


# ---- shares and ranks ---------------------------------------------------------------------------


def imbalance(sizes: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    loads = [sum(sizes[i] * (P_REF + sizes[i]) for i in share) for share in shares]
    return max(loads) / (sum(loads) / len(loads))


def shares_figures(packs: int = 200, images_a_pack: int = 32) -> list[Figure]:
    rng = np.random.Generator(np.random.Philox(1))
    table = [["", "by cost", "in order"]]
    figures = []
    for ranks in (2, 4, 8):
        dealt, cut = [], []
        for _ in range(packs):
            sizes = (4 * rng.integers(4, 1025, images_a_pack)).tolist()
            dealt.append(imbalance(sizes, share_images(sizes, ranks)))
            bounds = [images_a_pack * i // ranks for i in range(ranks + 1)]
            cut.append(imbalance(sizes, [range(*bounds[i : i + 2]) for i in range(ranks)]))
        mean = statistics.mean(dealt)
        table.append([f"{ranks} ranks", f"{mean:.3f}", f"{statistics.mean(cut):.3f}"])
        figures.append(
            Figure(
                name=f"costliest share over the mean, {images_a_pack} images, {ranks} ranks",
                value=mean,
                unit="x",
                target=f"at most {MOST_IMBALANCE:g}",
                reached=mean <= MOST_IMBALANCE,
            )
        )
    print("\n".join(aligned(table)))
    return figures


def rank_run(rank: int, _ranks: int, patches: int, turns: int) -> None:
    tower, pixels, grid = inputs(patches, "cpu")
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    both = dist.group.WORLD
    assert both is not None
    ratios, seconds = [], []
    for turn in range(turns + 1):
        took = []
        for group in (alone, both):
            dist.barrier()
            began = time.perf_counter()
            made = cp_forward(tower, pixels, grid, group)
            assert isinstance(made, Tensor)
            made.square().sum().backward()
            took.append(time.perf_counter() - began)
        if turn:
            ratios.append(took[0] / took[1])
            seconds.append(took)
    if rank == 0:
        one, two = (statistics.median(column) for column in zip(*seconds, strict=True))
        print(f"1 rank {one:.2f} s, 2 ranks {two:.2f} s, {statistics.median(ratios):.2f} x as fast")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    print(f"machine:  {machine()}")
    print(f"versions: Python {platform.python_version()}, torch {torch.__version__}")
    print(f"command:  python benchmarks/vision.py {' '.join(sys.argv[1:])}".rstrip())
    print("\ngroups\n------", flush=True)
    figures = groups(args.patches, args.turns, args.device)
    print("\nshares\n------", flush=True)
    figures += shares_figures()
    print("\nranks\n-----", flush=True)
    with Ranks(rank_run, 2, args.patches // 2, args.turns) as ranks:
        ranks.results(LIMIT_S)
    print()
    for figure in figures:
        show(figure)
    return 0 if show_reached(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
