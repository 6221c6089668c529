"""Lightning's `Trainer` on a `PackStream`, as a data module.

Invariants: the state in a checkpoint is that behind the batch trained last: Lightning reads one
batch ahead of a loader without a length, and what it has read ahead is not counted; a checkpoint
is continued where it says or refused, also where `configure_optimizers` reads
`trainer.estimated_stepping_batches` (there Lightning forgets the state of loaders, so this is
no stateful loader: a data module's state is restored before any loader is made).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from dataservice.errors import ResumeRefused
from trainer_client.adapters.steps import check_accumulation
from trainer_client.batch import MicroBatch
from trainer_client.stream import PackStream

log = logging.getLogger(__name__)


class PackDataModule(LightningDataModule):
    """Training data from a stream.

        trainer.fit(model, datamodule=PackDataModule(stream, convert), ckpt_path=...)

    `training_step` gets what `convert` makes of a micro-batch; one that wants to know what
    `stream.open()` says calls it itself: a stream that is open before `fit` cannot go on from a
    checkpoint. `Trainer(max_steps=..., accumulate_grad_batches=...)`: the second equal to the
    stream's `micro_steps`; Lightning divides the loss by it. A fit ends with the data, also
    before `max_steps`. Give `inference_mode`, loggers and the rest as ever; other loaders by a
    subclass, with their batches moved as Lightning does.
    """

    def __init__(self, stream: PackStream, convert: Callable[[MicroBatch], Any]) -> None:
        super().__init__()
        self._stream, self._convert = stream, convert
        self._trained: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream was behind the batch trained last."""
        return {"stream": {} if self._trained is None else self._trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["stream"]
        if self._stream.state_dict() != state:
            self._stream.load_state_dict(state)
        self._trained = state
        step = state["cursor"]["step"] if state else 0
        log.info("the stream goes on at step %d", step)

    def train_dataloader(self) -> _Loader:
        trainer = self.trainer
        if trainer is not None and trainer.ckpt_path is not None and self._trained is None:
            raise ResumeRefused(
                f"the checkpoint {trainer.ckpt_path} does not say where the data was; fit it with "
                "PackDataModule when it is written, or load the weights alone"
            )
        if trainer is not None and trainer.ckpt_path is not None:
            # It has forgotten that this step is saved, and would save it again inside the next one.
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback._last_global_step_saved = trainer.global_step
        return _Loader(self._stream, trainer)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Called when a batch is to be trained: the stream has it on the device already."""
        if not isinstance(batch, _Ahead):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        steps = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        check_accumulation(batch.batch, steps, setting="accumulate_grad_batches")
        self._trained = batch.state
        return self._convert(batch.batch)


class _Ahead:
    """A batch that was read, and the state behind it; nothing that Lightning looks into."""

    def __init__(self, batch: MicroBatch, state: dict[str, Any]) -> None:
        self.batch, self.state = batch, state


class _Loader:
    """Stops the fit at the first epoch without a batch, where it would go on with empty ones."""

    def __init__(self, stream: PackStream, trainer: Trainer | None) -> None:
        self._stream, self._trainer = stream, trainer

    def __iter__(self) -> Iterator[_Ahead]:
        has_ended = True
        for batch in self._stream:
            has_ended = False
            yield _Ahead(batch, self._stream.state_dict())
        if has_ended and self._trainer is not None:
            log.warning("the data has ended at step %d", self._trainer.global_step)
            self._trainer.should_stop = True
