"""Ray Train's workers on a PackStream, each one data-parallel rank.

    python -m trainer_client.examples.train_ray --endpoint HOST:PORT --ranks 2 --checkpoint DIR

The service runs in a Ray cluster of its own or in the same one; trainers only know its endpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer

from trainer_client.adapters.ray_train import load_state, save_state, worker_layout
from trainer_client.examples.tiny_trainers import (
    TensorVLM,
    arguments,
    describe,
    open_stream,
    report,
    tensors,
)


def train_loop(config: dict[str, Any]) -> None:
    """One worker; `ray.train.report` stores a checkpoint and `get_checkpoint` brings it back."""
    args, layout = argparse.Namespace(**config), worker_layout()
    model = TensorVLM(describe(args, layout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with open_stream(args, layout) as stream:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / "model.pt", weights_only=True)
                load_state(stream, folder)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        if stream.open().first_step >= args.steps:
            return
        total = torch.zeros((), dtype=torch.float64)
        for batch in stream:
            last = batch.is_last_micro_step
            with nullcontext() if last else wrapped.no_sync():
                loss = wrapped(**tensors(batch)) / max(1, batch.meta["loss_tokens"])
                (loss * layout.dp_size).backward()
            total += loss.detach()
            if not last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            done = batch.step + 1
            metrics = {"step": batch.step, "loss": total.item()}
            if layout.rank == 0:
                report(batch.step, total)
            total = torch.zeros_like(total)
            if done != args.steps and done % args.checkpoint_every:
                continue
            with tempfile.TemporaryDirectory() as folder:
                stored = None
                if layout.rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(folder) / "model.pt")
                    save_state(stream, folder)
                    stored = ray.train.Checkpoint.from_directory(folder)
                ray.train.report(metrics, checkpoint=stored)
            if done == args.steps:
                break


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with Ray Train.", argv)
    folder = Path(args.checkpoint or tempfile.mkdtemp()).absolute()
    # The same name and place: Ray Train goes on from the last checkpoint that it reported there.
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(num_workers=args.ranks),
        run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder.parent)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
