"""Placement changes who computes what, not what is learnt: two ranks, float64, 20 steps.

Run as a script it is one of the two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.train_tiny_vlm import ModelSizes, build_model, train
from trainer_client.testing import FakeService, balanced, synthetic_packs, with_hole

RANKS, MICRO_STEPS, STEPS = 2, 2, 20
PACKS_PER_CELL = 2
"""With one pack a cell, even a mean per micro-batch would not notice where a pack is computed."""


class MeanPerMicroBatch:
    """The control: batches whose loss is normalised by their own label count."""

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        for batch in self.stream:
            own = int((batch["labels"] != -100).sum())
            batch.meta["loss_tokens"] = own * RANKS * MICRO_STEPS
            yield batch


def one_run(endpoint: str, rank: int, *, mean_per_micro_batch: bool) -> dict[str, Any]:
    stream = PackStream(
        endpoint,
        job="tiny",
        layout=ParallelLayout.data_parallel(rank, RANKS),
        micro_steps=MICRO_STEPS,
        packs_per_cell=PACKS_PER_CELL,
        digests=True,
    )
    losses: list[float] = []
    cells: list[Any] = []

    def after_step(_step: int, loss: float) -> bool:
        losses.append(loss)
        return True

    def watched(batches: Any) -> Any:
        for batch in batches:
            cells.append(cell_of(batch))
            yield batch

    with stream:
        info = stream.open()
        sizes = ModelSizes.of(info, dim=32, vision_dim=16)
        model = build_model(sizes).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = MeanPerMicroBatch(stream) if mean_per_micro_batch else stream
        train(DistributedDataParallel(model), optimizer, watched(batches), after_step=after_step)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": losses, "weights": weights.tolist(), "cells": cells}


def cell_of(batch: MicroBatch) -> list[Any]:
    meta = batch.meta
    return [
        meta["step"],
        meta["micro_step"],
        meta["pack_ids"],
        meta["digests"],
        meta["num_images"],
        meta["ranks_without_images"],
        len(meta["holes"]),
    ]


def rank_main(rank: int, endpoints: dict[str, str], folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    runs = {
        f"{name} {kind}": one_run(endpoint, rank, mean_per_micro_batch=kind == "mean")
        for name, endpoint in endpoints.items()
        for kind in ("planned", "mean")
    }
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: "arrival planned", "arrival mean", "balanced planned", "balanced mean"."""
    folder = tmp_path_factory.mktemp("equivalence")
    packs = synthetic_packs(RANKS * MICRO_STEPS * PACKS_PER_CELL * STEPS, seed=5)
    hole = next(i for i, pack in enumerate(packs) if pack.num_images and i > 40)
    packs[hole] = with_hole(packs[hole])
    with FakeService(packs) as arrival, FakeService(packs, placement=balanced) as placed:
        _run_ranks({"arrival": arrival.endpoint, "balanced": placed.endpoint}, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _run_ranks(endpoints: dict[str, str], folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(RANKS):
        arguments = [str(rank), json.dumps(endpoints), str(folder)]
        processes.append(
            subprocess.Popen([sys.executable, __file__, *arguments], env=environment, cwd=root)
        )
    try:
        assert [process.wait(timeout=110) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()


def difference(runs: list[dict[str, Any]], kind: str, what: str) -> float:
    a, b = (np.array(runs[0][f"{name} {kind}"][what]) for name in ("arrival", "balanced"))
    return float(np.abs(a - b).max())


def test_the_same_packs_are_computed_elsewhere(runs: list[dict[str, Any]]) -> None:
    arrival, placed = (
        [cell for run in runs for cell in run[f"{name} planned"]["cells"]]
        for name in ("arrival", "balanced")
    )
    assert len(arrival) == len(placed) == RANKS * MICRO_STEPS * STEPS
    different = sum(set(a[2]) != set(b[2]) for a, b in zip(arrival, placed, strict=True))
    assert different >= len(arrival) / 2
    by_step: list[dict[int, set[Any]]] = []
    for cells in (arrival, placed):
        steps: dict[int, set[Any]] = {}
        for step, _, pack_ids, digests, *_ in cells:
            steps.setdefault(step, set()).update(zip(pack_ids, digests, strict=True))
        by_step.append(steps)
    assert by_step[0] == by_step[1]
    for cells, num_ranks in ((arrival, 1), (placed, RANKS)):
        assert any(images == 0 and without == num_ranks for *_, images, without, _ in cells)
        assert sum(holes for *_, holes in cells) == 1


def test_losses_and_weights_are_equal(runs: list[dict[str, Any]]) -> None:
    assert len(runs[0]["arrival planned"]["losses"]) == STEPS
    assert difference(runs, "planned", "losses") < 1e-9
    assert difference(runs, "planned", "weights") < 1e-9
    for run in ("arrival planned", "balanced planned"):
        assert runs[0][run]["weights"] == runs[1][run]["weights"]
        losses = runs[0][run]["losses"]
        assert losses[-1] < losses[0]


def test_a_mean_per_micro_batch_would_differ(runs: list[dict[str, Any]]) -> None:
    assert difference(runs, "mean", "losses") > 1e-6
    assert difference(runs, "mean", "weights") > 1e-6


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
