"""Lightning's `Trainer` on a PackStream.

python -m trainer_client.examples.train_lightning --endpoint HOST:PORT --checkpoint DIR
torchrun --nproc-per-node 2 -m trainer_client.examples.train_lightning --endpoint HOST:PORT ...
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from dataservice.wire.messages import SessionOpened
from trainer_client import MicroBatch, ParallelLayout
from trainer_client.adapters.lightning import PackDataModule
from trainer_client.examples.tiny_trainers import (
    TensorVLM,
    arguments,
    describe,
    open_stream,
    report,
    tensors,
)


class TinyModule(LightningModule):
    def __init__(self, info: SessionOpened) -> None:
        super().__init__()
        self.model = TensorVLM(info)
        self.total = 0.0

    def training_step(self, batch: MicroBatch, _number: int) -> Tensor:
        # Lightning divides by accumulate_grad_batches, DDP averages over the ranks
        steps, ranks = self.trainer.accumulate_grad_batches, self.trainer.world_size
        loss: Tensor = self.model(**tensors(batch)) * ranks / max(1, batch.meta["loss_tokens"])
        self.total += self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
        if batch.is_last_micro_step:
            if self.trainer.is_global_zero:
                report(batch.step, self.total)
            self.total = 0.0
        return loss * steps

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with Lightning.", argv)
    if "WORLD_SIZE" not in os.environ:
        run(args, ParallelLayout())
        return
    dist.init_process_group("gloo")  # the streams draw their run id there; Lightning takes it over
    try:
        run(args, ParallelLayout.from_env())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: argparse.Namespace, layout: ParallelLayout) -> None:
    callbacks = []
    if args.checkpoint:
        callbacks.append(
            ModelCheckpoint(
                args.checkpoint, save_last=True, every_n_train_steps=args.checkpoint_every
            )
        )
    trainer = Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=args.micro_steps,
        use_distributed_sampler=False,
        callbacks=callbacks,
        accelerator="cpu",
        devices=layout.ranks_per_host or 1,
        num_nodes=layout.dp_size // (layout.ranks_per_host or 1),
        strategy="ddp" if layout.dp_size > 1 else "auto",
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = TinyModule(describe(args, layout))
    with open_stream(args, layout) as stream:
        last = Path(args.checkpoint or "") / "last.ckpt"
        trainer.fit(
            module,
            datamodule=PackDataModule(stream, lambda batch: batch),
            ckpt_path=str(last) if args.checkpoint and last.is_file() else None,
        )


if __name__ == "__main__":
    main()
