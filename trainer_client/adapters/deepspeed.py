"""DeepSpeed on a `PackStream`: the iterator of `train_batch`, and the state in its checkpoints.

Invariants: DeepSpeed never wraps the stream: no loader of its own splits packs or ranks; the
loss that goes into `engine.backward` or out of a pipeline makes the step's gradient a sum over its
planned tokens; a checkpoint's client state says where the stream was.

    for batch in stream:                            # an engine without a pipeline
        loss = engine(batch) * loss_scale(engine, batch)
        engine.backward(loss)
        engine.step()
    ...
    packs = PackIterator(stream, engine, convert)   # a pipeline; on the ranks that read
    for _ in range(steps):
        loss = engine.train_batch(data_iter=packs)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed import DeepSpeedEngine

from dataservice.errors import ResumeRefused
from trainer_client.adapters.steps import check_accumulation
from trainer_client.batch import MicroBatch
from trainer_client.stream import PackStream

KEY = "pack_stream"


def loss_scale(engine: DeepSpeedEngine, batch: MicroBatch) -> float:
    """What a micro-batch's sum of token losses is multiplied by.

    The engine divides by its gradient accumulation steps and averages over data-parallel ranks.
    """
    steps = engine.gradient_accumulation_steps()
    check_accumulation(batch, steps, setting="gradient_accumulation_steps")
    ranks: int = engine.dp_world_size
    return float(steps * ranks / max(1, batch.meta["loss_tokens"]))


class PackIterator:
    """What `PipelineEngine.train_batch(data_iter=...)` reads: `(inputs, labels)` by `convert`.

    For the ranks of the first and the last stage, which read the same packs; the others are given
    None. A pipeline's loss function gets no `meta`: let `convert` put `loss_scale` into labels.
    """

    def __init__(
        self,
        stream: PackStream,
        engine: DeepSpeedEngine,
        convert: Callable[[MicroBatch, float], Any],
    ) -> None:
        self._stream, self._engine, self._convert = stream, engine, convert

    def __iter__(self) -> PackIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._stream)
        return self._convert(batch, loss_scale(self._engine, batch))


def save_checkpoint(engine: DeepSpeedEngine, stream: PackStream, folder: str, **more: Any) -> None:
    """`engine.save_checkpoint` with the stream's state in it; between steps, on every rank."""
    client_state = more.pop("client_state", {}) | {KEY: stream.state_dict()}
    engine.save_checkpoint(folder, client_state=client_state, **more)


def load_checkpoint(
    engine: DeepSpeedEngine, stream: PackStream, folder: str, **more: Any
) -> dict[str, Any] | None:
    """`engine.load_checkpoint`, then the stream's state; before the first batch.

    Returns the client state, or None where there is no checkpoint yet.
    """
    path, client_state = engine.load_checkpoint(folder, **more)
    if path is None:
        return None
    if KEY not in client_state:
        raise ResumeRefused(
            f"the checkpoint {path} does not say where the data was; write it with "
            "trainer_client.adapters.deepspeed.save_checkpoint"
        )
    stream.load_state_dict(client_state[KEY])
    return dict(client_state)
