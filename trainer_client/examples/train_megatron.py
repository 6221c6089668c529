"""Megatron's `external` loader on a PackStream, in a loop that runs without a GPU.

    torchrun --nproc-per-node 2 -m trainer_client.examples.train_megatron --endpoint HOST:PORT ...

`provider`, `forward_step` and where the state is written are those of a Megatron-LM script; its
own schedules and optimizer need CUDA, so `train` stands for them: a step's micro-batches by
`next(data_iterator)`, gradients of token sums, divided by the tokens of the step over all ranks
(`calculate_per_token_loss`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor, nn

from trainer_client import MicroBatch, ParallelLayout
from trainer_client.adapters.megatron_loader import ExternalLoader, make_loader
from trainer_client.examples.tiny_trainers import TensorVLM, arguments, describe, report, tensors


def provider(args: argparse.Namespace, iteration: int) -> ExternalLoader | None:
    """What `train_valid_test_dataloaders_provider` returns as the first of three."""
    loader = make_loader(
        args.endpoint, job=args.job, micro_steps=args.micro_steps, convert=lambda batch: batch
    )
    if loader is not None and iteration:
        saved = torch.load(state_file(args.checkpoint, iteration, 0), weights_only=True)
        loader.restore_state(saved["dataloader_state_dict"])
    return loader


def state_file(folder: str, iteration: int, dp_rank: int) -> Path:
    """Where Megatron-LM's `--dataloader-save` writes; the state is the same in each of them."""
    path = Path(folder) / f"iter_{iteration:07d}" / "mp_rank_00"
    return path / f"train_dataloader_dprank{dp_rank:03d}.pt"


def forward_step(data_iterator: RerunDataIterator, model: nn.Module) -> tuple[Tensor, MicroBatch]:
    batch: MicroBatch = next(data_iterator)
    return model(**tensors(batch)), batch


def train(args: argparse.Namespace) -> None:
    model = TensorVLM(describe(args, ParallelLayout.from_megatron()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracker = Path(args.checkpoint or "") / "latest_checkpointed_iteration.txt"
    done = int(tracker.read_text()) if args.checkpoint and tracker.is_file() else 0
    if done:
        saved = torch.load(Path(args.checkpoint) / f"model_{done}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    loader = provider(args, done)
    assert loader is not None, "this example is data-parallel only"
    data_iterator = RerunDataIterator(loader)
    group = parallel_state.get_data_parallel_group()
    with loader.stream:
        while done < args.steps:
            total = torch.zeros((), dtype=torch.float64)
            for _ in range(args.micro_steps):
                loss, batch = forward_step(data_iterator, model)
                loss.backward()
                total += loss.detach()
            tokens = max(1, batch.meta["loss_tokens"])
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= tokens
            optimizer.step()
            optimizer.zero_grad()
            data_iterator.advance()
            dist.all_reduce(total, group=group)
            if parallel_state.get_data_parallel_rank() == 0:
                report(done, total / tokens)
            done += 1
            if args.checkpoint and (done == args.steps or done % args.checkpoint_every == 0):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(args.checkpoint, done, data_iterator, state)


def save(
    folder: str, iteration: int, data_iterator: RerunDataIterator, state: dict[str, Any]
) -> None:
    """The loader's state as Megatron writes it, then the rest."""
    dp_rank = parallel_state.get_data_parallel_rank()
    path = state_file(folder, iteration, dp_rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": data_iterator.iterable.save_state()}, path)
    dist.barrier()
    if dp_rank == 0:
        torch.save(state, Path(folder) / f"model_{iteration}.pt")
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with Megatron's external loader.", argv)
    if "WORLD_SIZE" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    dist.init_process_group("gloo")
    try:
        parallel_state.initialize_model_parallel()
        train(args)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
