"""What adapters of trainers that count micro-batches by themselves check.

Invariants: a trainer whose steps are not the stream's steps is refused at its first wrong batch,
before the optimizer moves on it.
"""

from __future__ import annotations

from dataservice.errors import ConfigError
from trainer_client.batch import MicroBatch


def check_accumulation(batch: MicroBatch, micro_steps: int, *, setting: str) -> None:
    """ConfigError unless a step of `batch` has `micro_steps` micro-batches; `setting` says so."""
    if batch.is_last_micro_step == (batch.micro_step + 1 == micro_steps):
        return
    own = f"{batch.micro_step + 1}" if batch.is_last_micro_step else f"more than {micro_steps}"
    raise ConfigError(
        f"{setting} is {micro_steps}, but a step of the stream has {own} micro-batches; give "
        f"PackStream(micro_steps=...) and {setting} the same number"
    )
