"""Megatron-LM's and Megatron-Bridge's `external` data loader on a `PackStream`.

Invariants: the ranks that read are tensor-parallel rank 0 of the first and the last pipeline
stage, which get the same packs; all other ranks have no loader; every rank calls `make_loader`, at
the same place; the state is the same on all of them and may be restored at another size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_client.agreement import shared_run_id
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


def make_loader(
    endpoint: str, *, convert: Callable[[MicroBatch], Any], **stream: Any
) -> ExternalLoader | None:
    """This rank's loader, or None where it does not read; on every rank, after Megatron's start.

    `stream` are `PackStream`'s arguments but for `layout` and `run_id`: `job`, `micro_steps`
    (Megatron's number of micro-batches), `device` and so on. Where every rank shall read instead of
    Megatron's broadcast, wrap in an `ExternalLoader` on each a `PackStream` whose layout is
    `ParallelLayout.from_megatron(trainer_shares=())`.
    """
    layout = ParallelLayout.from_megatron()
    run_id = shared_run_id(layout)
    if not layout.reads:
        return None
    return ExternalLoader(PackStream(endpoint, layout=layout, run_id=run_id, **stream), convert)
