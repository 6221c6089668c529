"""torchtitan's `Trainer` on a PackStream: its small Llama reads the text, image tokens and all.

    torchrun --nproc-per-node 1 -m trainer_client.examples.train_torchtitan --endpoint HOST:PORT ...

In a config of yours it is the one line `dataloader=PackDataLoader.Config(...)`; a vision model
takes `convert=vision_batch`. torchtitan needs a GPU.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from trainer_client import ParallelLayout
from trainer_client.adapters.torchtitan import PackDataLoader
from trainer_client.examples.tiny_trainers import arguments, describe, report


class NoTokenizer(BaseTokenizer):
    """The service tokenises."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Report(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        report(step - 1, global_avg_loss)


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train torchtitan's small Llama.", argv)
    pack_length = describe(args, ParallelLayout()).pack_length
    config = Trainer.Config(
        model_spec=model_registry("debugmodel"),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        dump_folder=args.checkpoint or tempfile.mkdtemp(),
        tokenizer=NoTokenizer.Config(),
        dataloader=PackDataLoader.Config(
            endpoint=args.endpoint, job=args.job, micro_steps=args.micro_steps
        ),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        metrics=Report.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=args.micro_steps,
            seq_len=pack_length,
            steps=args.steps,
            disable_cuda_graphs=True,
        ),
        debug=DebugConfig(seed=0),
        checkpoint=CheckpointManager.Config(
            enable=bool(args.checkpoint),
            interval=args.checkpoint_every,
            last_save_model_only=False,
        ),
    )
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
        trainer.dataloader.close()


if __name__ == "__main__":
    main()
