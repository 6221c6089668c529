"""Hugging Face's `Trainer` on a `PackStream`.

Invariants: a rank reads its own stream and hands it to nobody: Accelerate never wraps it, so no
batch is dispatched, split, sharded by rank, or read ahead; a checkpoint's `trainer_state.json`
holds where the stream was after the step that was saved; training goes on there or not at all.

Not wrapping is what matters: `accelerator.prepare(DataLoader(stream))` would have rank 0 read for
all (`dispatch_batches`), or every rank drop the batches that it counts as the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from dataservice.errors import ConfigError, ResumeRefused
from trainer_client.adapters.steps import check_accumulation
from trainer_client.batch import MicroBatch
from trainer_client.stream import PackStream

Convert = Callable[[MicroBatch], dict[str, Any]]


class PackTrainer(Trainer):
    """`Trainer` whose training data is a stream; everything else is the library's.

        trainer = PackTrainer(model, args, stream=stream, convert=convert)
        trainer.train(resume_from_checkpoint=...)

    `convert` makes the model's keyword arguments of a micro-batch. Labels come unshifted under
    "labels". A `convert` that wants to know what `stream.open()` says calls it itself: a stream
    that is open before `train` cannot go on from a checkpoint.

    The arguments must have `max_steps` (a stream has no length), `gradient_accumulation_steps`
    equal to the stream's `micro_steps`, and `ignore_data_skip=True` (the stream resumes by its
    own state; replaying would skip what was not trained). With several ranks,
    `average_tokens_across_devices` (the default) makes the loss a sum over the tokens of the
    whole step, so that it does not matter which rank computes which pack; the model's forward
    must take `num_items_in_batch`, as those of transformers do, or give `compute_loss_func`.
    """

    def __init__(self, *args: Any, stream: PackStream, convert: Convert, **settings: Any) -> None:
        super().__init__(*args, **settings)
        own = self.args
        wrong = {
            "max_steps": (own.max_steps > 0, "the number of steps to train"),
            "ignore_data_skip": (own.ignore_data_skip, "True"),
            "average_tokens_across_devices": (own.average_tokens_across_devices, "True"),
        }
        for name, (is_fine, value) in wrong.items():
            if not is_fine:
                raise ConfigError(f"TrainingArguments.{name} is {getattr(own, name)}; set {value}")
        if own.n_gpu > 1:
            raise ConfigError(
                f"one process drives {own.n_gpu} GPUs and would split each pack among them; start "
                "one process a GPU with torchrun or accelerate launch"
            )
        self._packs = _Packs(stream, convert, own.gradient_accumulation_steps)
        self.add_callback(PackCursor())

    def get_train_dataloader(self) -> Any:
        return self._packs


class _Packs:
    """What the Trainer iterates over; it has no length and knows no epochs."""

    def __init__(self, stream: PackStream, convert: Convert, micro_steps: int) -> None:
        self.stream, self._convert, self._micro_steps = stream, convert, micro_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.stream:
            check_accumulation(batch, self._micro_steps, setting="gradient_accumulation_steps")
            yield self._convert(batch)


class PackCursor(TrainerCallback, ExportableState):
    """Keeps the stream's state in the Trainer's own; `PackTrainer` adds it."""

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """What the Trainer writes to `trainer_state.json` when it saves."""
        return {"args": {}, "attributes": {"cursor": self.cursor}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: _Packs, **_: Any
    ) -> None:
        if state.global_step == 0:
            return
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ResumeRefused(
                f"the checkpoint of step {state.global_step} was written without PackTrainer and "
                "does not say where the data was; start without resume_from_checkpoint, or load "
                "the model alone"
            )
        self.cursor = saved["attributes"]["cursor"]
        if train_dataloader.stream.state_dict() != self.cursor:
            train_dataloader.stream.load_state_dict(self.cursor)

    def on_step_end(
        self, args: Any, state: Any, control: Any, train_dataloader: _Packs, **_: Any
    ) -> None:
        self.cursor = train_dataloader.stream.state_dict()
