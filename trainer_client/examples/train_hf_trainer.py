"""Hugging Face's `Trainer` on a PackStream.

    python -m trainer_client.examples.train_hf_trainer --endpoint HOST:PORT --checkpoint DIR
    torchrun --nproc-per-node 2 -m trainer_client.examples.train_hf_trainer --endpoint HOST:PORT ...

With a model of transformers, `convert` is one of `trainer_client.adapters` and the rest stays.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dataservice.wire.messages import SessionOpened
from trainer_client import ParallelLayout
from trainer_client.adapters.huggingface import PackTrainer
from trainer_client.examples.tiny_trainers import (
    TensorVLM,
    arguments,
    describe,
    open_stream,
    report,
    tensors,
)


class MeanLossVLM(nn.Module):
    """The tiny model with its loss as models of transformers give it."""

    def __init__(self, info: SessionOpened) -> None:
        super().__init__()
        self.vlm = TensorVLM(info)

    def forward(self, num_items_in_batch: Tensor | int, **named: Tensor) -> dict[str, Tensor]:
        return {"loss": self.vlm(**named) / num_items_in_batch}


class Report(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            report(state.global_step - 1, float(logs["loss"]))


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with Hugging Face's Trainer.", argv)
    folder = args.checkpoint or tempfile.mkdtemp()
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        gradient_accumulation_steps=args.micro_steps,
        ignore_data_skip=True,
        save_strategy="steps" if args.checkpoint else "no",
        save_steps=args.checkpoint_every,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=True,
    )
    layout = ParallelLayout.data_parallel(settings.process_index, settings.world_size)
    model = MeanLossVLM(describe(args, layout))
    with open_stream(args, layout) as stream:
        trainer = PackTrainer(
            model,
            settings,
            stream=stream,
            convert=tensors,
            callbacks=[Report()],
            optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3), None),
        )
        last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
