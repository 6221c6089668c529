"""Times the vision and the language part of micro-batches, as rows for `dataservice fit-cost`.

Invariants: nothing waits for the device but `close` and a log that is 64 rows behind; a row is
written whole or not at all; its terms and its times are of the same micro-batch.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainer_client.batch import MicroBatch
from trainer_client.cost_terms import cost_terms

BEHIND = 64
"""Rows whose times the device does not know yet."""


class CostTimer:
    """Writes one JSON line a micro-batch: the terms of its cost, and `ms` of compute.

        with CostTimer(f"timings-rank{rank}.jsonl", vision=model.vision) as timer:
            for batch in stream:
                with timer.micro_batch(batch), model.no_sync():
                    loss = model(batch) ...
                    loss.backward()

    `vision_ms` is the time inside `vision` (any number of calls) and of the backward pass from
    where it reaches the output of `vision` to its end: a vision encoder stands at the beginning of
    the model, so its backward comes last. `language_ms` is the rest; `ms` is both, which
    `dataservice fit-cost` fits. By CUDA events where the batch is on CUDA, else by the clock.

    Time compute alone, not waiting for other ranks: with DDP inside `no_sync` and not the last
    micro-step; where layers gather weights from other ranks (FSDP), one rank or node by itself. The
    first `skip` micro-batches, which compile and allocate, are not written.
    """

    def __init__(self, path: str, *, vision: nn.Module, skip: int = 10) -> None:
        self._log = open(path, "a", encoding="utf-8")
        self._skip = skip
        self._open: _Timed | None = None
        self._waiting: deque[_Timed] = deque()
        self._hooks = [
            vision.register_forward_pre_hook(self._enters),
            vision.register_forward_hook(self._leaves),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Around forward and backward of `batch`. After an exception there is no row."""
        timed = _Timed(batch=_without_pixels(batch), clock=_clock(batch))
        timed.start = timed.clock.mark()
        self._open = timed
        try:
            yield
            timed.end = timed.clock.mark()
        finally:
            self._open = None
        if self._skip > 0:
            self._skip -= 1
            return
        self._waiting.append(timed)
        while self._waiting and (
            len(self._waiting) > BEHIND or self._waiting[0].clock.passed(self._waiting[0].end)
        ):
            self._write(self._waiting.popleft())

    def close(self) -> None:
        """Write what is left and leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        while self._waiting:
            self._write(self._waiting.popleft())
        self._log.close()

    def _write(self, timed: _Timed) -> None:
        self._log.write(json.dumps(timed.row()) + "\n")

    def _enters(self, _module: nn.Module, _args: Any) -> None:
        timed = self._open
        if timed and timed.backward is None:  # later calls are recomputation, in the backward pass
            timed.entered = timed.clock.mark()

    def _leaves(self, _module: nn.Module, _args: Any, output: Any) -> None:
        timed = self._open
        if not timed or timed.backward is not None:
            return
        timed.inside.append((timed.entered, timed.clock.mark()))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(timed.backward_begins)


@dataclass(kw_only=True, slots=True)
class _Timed:
    batch: MicroBatch
    clock: _Clock
    start: Any = None
    end: Any = None
    entered: Any = None
    inside: list[tuple[Any, Any]] = field(default_factory=list)
    backward: Any = None
    """When the gradient of what `vision` made was there first."""

    def backward_begins(self, _gradient: Tensor) -> None:
        if self.backward is None:
            self.backward = self.clock.mark()

    def row(self) -> dict[str, Any]:
        clock, meta = self.clock, self.batch.meta
        total = clock.ms(self.start, self.end)
        vision = sum(clock.ms(*interval) for interval in self.inside)
        if self.backward is not None:
            vision += clock.ms(self.backward, self.end)
        where = {name: meta[name] for name in ("step", "micro_step", "dp_rank") if name in meta}
        times = {"ms": total, "vision_ms": vision, "language_ms": total - vision}
        return where | cost_terms(self.batch) | times


class _Clock:
    """Of the CPU."""

    def mark(self) -> Any:
        return time.perf_counter()

    def passed(self, _mark: Any) -> bool:
        return True

    def ms(self, start: Any, end: Any) -> float:
        return 1e3 * float(end - start)


class _CudaClock(_Clock):
    """Of the stream that is current when it is made; backward threads mark the same one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def ms(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def _clock(batch: MicroBatch) -> _Clock:
    device = batch["input_ids"].device
    return _CudaClock(device) if device.type == "cuda" else _Clock()


def _without_pixels(batch: MicroBatch) -> MicroBatch:
    """What `cost_terms` reads, so that a row that waits holds little memory."""
    small = MicroBatch(
        {name: value for name, value in batch.items() if name not in ("pixel_values", "labels")}
    )
    small.__dict__.update(batch.__dict__)
    return small


def _tensors(output: Any) -> Iterator[Tensor]:
    """Those in a tensor, tuple, list or mapping of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
