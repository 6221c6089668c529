"""A micro-batch as one row of bytes and back: how a pack goes from rank to rank.

Invariants: header and payload together give back equal tensors, values and meta; the header alone
tells what the payload holds; tensors begin at multiples of ALIGN, so they are views of what was
received; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dataservice.errors import ConfigError, WireError
from dataservice.wire.schema import decode_plain, encode_plain
from trainer_client.batch import MicroBatch, VisionInfo

ALIGN = 64
WHAT = "pack to exchange"


def padded(num_bytes: int) -> int:
    """The next multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


def as_micro_batch(item: Mapping[str, Any]) -> MicroBatch:
    """The item itself, or a plain mapping as a MicroBatch with an empty meta."""
    if isinstance(item, MicroBatch):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"the source yields {type(item).__name__}; it must yield micro-batches, or dicts of "
            "tensors and JSON values"
        )
    batch = MicroBatch(item)
    batch.meta, batch.step, batch.micro_step = {}, -1, 0
    batch.is_last_micro_step = False
    return batch


def describe(batch: MicroBatch) -> bytes:
    """The header. ConfigError names the value that is neither a tensor nor of a JSON type."""
    tensors = [
        [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for name, value in _tensors(batch)
    ]
    plain = {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}
    vision = getattr(batch, "vision", None)
    header = {
        "tensors": tensors,
        "plain": plain,
        "meta": batch.meta,
        "vision": None if vision is None else dataclasses.asdict(vision),
    }
    try:
        return encode_plain(header, what=WHAT)
    except WireError as error:
        raise ConfigError(
            f"{error}: a pack holds tensors, and beside them None, bool, int, float, str, list and "
            "dict only; leave the rest out"
        ) from None


def payload_bytes(batch: MicroBatch) -> int:
    """Of the tensors, each padded to ALIGN."""
    return sum(padded(value.nbytes) for _, value in _tensors(batch))


def write(batch: MicroBatch, into: torch.Tensor) -> None:
    """The tensors into `into`, uint8 [payload_bytes], on the CPU or a device."""
    at = 0
    for _, value in _tensors(batch):
        if value.numel():
            flat = value.contiguous().reshape(-1).view(torch.uint8)
            into[at : at + len(flat)].copy_(flat, non_blocking=True)
        at += padded(value.nbytes)


def read(header: bytes, payload: torch.Tensor) -> MicroBatch:
    """The micro-batch whose tensors are views of `payload`, uint8 [payload_bytes].

    `step`, `micro_step` and `is_last_micro_step` are not set. WireError for what does not fit.
    """
    told = decode_plain(header, what=WHAT)
    batch, at = MicroBatch(), 0
    for name, dtype_name, shape in told["tensors"]:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise WireError(f"{WHAT}: {name} has dtype {dtype_name!r}, which torch lacks")
        num_bytes = dtype.itemsize * _product(shape)
        if at + num_bytes > len(payload):
            raise WireError(f"{WHAT}: {name} goes beyond {len(payload)} bytes")
        batch[name] = payload[at : at + num_bytes].view(dtype).view(shape)
        at += padded(num_bytes)
    if at != len(payload):
        raise WireError(f"{WHAT}: {len(payload)} bytes, its tensors take {at}")
    batch.update(told["plain"])
    batch.meta = told["meta"]
    if told["vision"] is not None:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in told["vision"].items()
        }
        batch.vision = VisionInfo(**values)
    return batch


def _tensors(batch: MicroBatch) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in batch.items() if isinstance(value, torch.Tensor))


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
