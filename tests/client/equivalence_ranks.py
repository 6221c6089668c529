"""What test_equivalence.py runs on every rank: the tiny model over one way to place the packs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.train_tiny_vlm import ModelSizes, build_model, train
from trainer_client.redistribute import RebalancedLoader

MOST_TOKENS = 128
"""Of a pack."""
MICRO_STEPS, PACKS_PER_CELL = 2, 2
"""With one pack a cell, even a mean per micro-batch would not notice where a pack is computed."""


def mean_per_micro_batch(batches: Iterable[MicroBatch], ranks: int) -> Iterator[MicroBatch]:
    """The control: batches whose loss is normalised by their own label count."""
    for batch in batches:
        own = int((batch["labels"] != -100).sum())
        batch.meta["loss_tokens"] = own * ranks * MICRO_STEPS
        yield batch


def watched(batches: Iterable[MicroBatch], cells: list[Any]) -> Iterator[MicroBatch]:
    for batch in batches:
        meta = batch.meta
        cells.append(
            [
                meta["step"],
                meta["micro_step"],
                meta["pack_ids"],
                meta["digests"],
                meta["num_images"],
                meta["ranks_without_images"],
                len(meta["holes"]),
                meta["loss_tokens"],
            ]
        )
        yield batch


def one_run(endpoint: str, rank: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """`options`: steps; rebalance, overlap: by RebalancedLoader; mean: the control."""
    joined_here = options.get("rebalance", False)
    stream = PackStream(
        endpoint,
        job="tiny",
        layout=ParallelLayout.data_parallel(rank, ranks),
        micro_steps=MICRO_STEPS * PACKS_PER_CELL if joined_here else MICRO_STEPS,
        packs_per_cell=1 if joined_here else PACKS_PER_CELL,
        digests=True,
    )
    losses: list[float] = []
    cells: list[Any] = []

    def after_step(step: int, loss: float) -> bool:
        losses.append(loss)
        return step + 1 < options["steps"]

    with ExitStack() as stack:
        stack.enter_context(stream)
        sizes = ModelSizes.of(stream.open(), dim=16, vision_dim=8, layers=1, heads=2)
        sizes = replace(sizes, pack_length=MOST_TOKENS)  # the same model for packs of all lengths
        batches: Iterable[MicroBatch] = stream
        if joined_here:
            batches = stack.enter_context(
                RebalancedLoader(
                    stream,
                    micro_steps=MICRO_STEPS,
                    packs_per_cell=PACKS_PER_CELL,
                    overlap=options["overlap"],
                    timeout_s=100.0,
                )
            )
        if options.get("mean"):
            batches = mean_per_micro_batch(batches, ranks)
        model = build_model(sizes).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        wrapped = DistributedDataParallel(model)
        train(wrapped, optimizer, watched(batches, cells), after_step=after_step)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": losses, "weights": weights.tolist(), "cells": cells}


def all_runs(rank: int, ranks: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """`wanted`: (endpoint, options) by name."""
    runs = {}
    for name, (endpoint, options) in wanted.items():
        runs[name] = one_run(endpoint, rank, ranks, options)
        dist.barrier()
    return runs
