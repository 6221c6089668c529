"""Megatron-LM's and Megatron-Bridge's `external` data loader on a `PackStream`.

Invariants: the ranks that read are tensor-parallel rank 0 of the first and the last pipeline
stage, which get the same packs; all other ranks have no loader; every rank calls `make_loader`, at
the same place; the state is the same on all of them and may be restored at another size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from trainer_client.batch import MicroBatch
from trainer_client.layout import ParallelLayout
from trainer_client.stream import PackStream


class ExternalLoader:
    """An iterator with the two methods by which Megatron checkpoints one.

    Megatron-LM (`--dataloader-type external --dataloader-save DIR`) saves what `save_state` gives
    as "dataloader_state_dict" and leaves restoring to the provider; Megatron-Bridge does both.
    """

    def __init__(self, stream: PackStream, convert: Callable[[MicroBatch], Any]) -> None:
        self.stream, self._convert = stream, convert

    def __iter__(self) -> ExternalLoader:
        return self

    def __next__(self) -> Any:
        return self._convert(next(self.stream))

    def save_state(self) -> dict[str, Any]:
        """Where the stream is, in JSON types; {} before the first batch of a new run."""
        return self.stream.state_dict()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Before the first batch."""
        self.stream.load_state_dict(state)


def is_dataloader_rank() -> bool:
    """Whether this rank reads: Megatron broadcasts the batch to its tensor-parallel peers."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return bool(parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage())


def readers_layout() -> ParallelLayout:
    """Where this rank stands among those that read; of a rank that does not, its stage's reader."""
    dp, cp = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = int(not parallel_state.is_pipeline_first_stage())
    dp_rank, cp_rank = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return ParallelLayout(
        rank=cp_rank + cp * (dp_rank + dp * stage), dp=dp, cp=cp, pp=min(stages, 2)
    )


def make_loader(
    endpoint: str, *, convert: Callable[[MicroBatch], Any], **stream: Any
) -> ExternalLoader | None:
    """This rank's loader, or None where it does not read; on every rank, after Megatron's start.

    `stream` are `PackStream`'s arguments but for `layout`: `job`, `micro_steps` (Megatron's number
    of micro-batches), `device` and so on. Where every rank shall read instead of Megatron's
    broadcast, make a `PackStream` on each and wrap it in an `ExternalLoader`.
    """
    # Making a stream draws the run's id with all ranks; a stream that is not opened costs nothing.
    made = PackStream(endpoint, layout=readers_layout(), **stream)
    return ExternalLoader(made, convert) if is_dataloader_rank() else None
