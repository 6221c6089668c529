"""Micro-batches on the trainer's device: the copy, and pixels in the form a vision model reads.

Invariants: the consumer's stream waits for the copy, never the CPU; a pinned buffer is kept until
the copy that reads it has ended; on the CPU nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from dataservice.errors import ConfigError
from trainer_client.batch import MicroBatch


def normalize(batch: MicroBatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`pixel_values` as the model's processor gives them: `(x / 255 - mean) / std`, by channel.

    Returns `dtype` [P, 3 * temporal_patch * patch * patch] on the batch's device, a still picture
    repeated along time; of tiles [P, 3, tile, tile]. Computed in float32, or in float64 when that
    is asked for. In float32 the values are bit by bit those of transformers' PIL image processors
    (and the formula of InternVL's preprocessing). Their torchvision form computes `(x - 255 mean) /
    (255 std)` of pixels that its own resize makes: the formula is up to 2.4e-7 away, the pixels by
    up to 3 in 0.7 % of all bytes (40 photos, transformers 5.24, torchvision 0.28).
    """
    pixels, vision = batch["pixel_values"], batch.vision
    work = torch.float64 if dtype == torch.float64 else torch.float32

    def by_channel(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=work, device=pixels.device).view(1, -1, 1)

    area = vision.side**2
    levels = pixels.view(len(pixels), len(vision.mean), area)
    # Three roundings, as there: a product with 1 / 255, or two steps in one, would give others.
    values = torch.div(levels, by_channel([255.0]))
    values = values.sub_(by_channel(vision.mean)).div_(by_channel(vision.std)).to(dtype)
    if vision.tile:
        return values.view(len(pixels), len(vision.mean), vision.tile, vision.tile)
    repeated = values.unsqueeze(2).expand(-1, -1, vision.temporal_patch, -1)
    return repeated.reshape(len(pixels), len(vision.mean) * vision.temporal_patch * area)


class DeviceCopier:
    """Moves micro-batches to one device. `stage` may run in another thread than `move`."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise ConfigError(f'device="{device}": torch sees no CUDA device; use device="cpu"')
        if self._cuda:
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._copies = torch.cuda.Stream(self.device)
            self._in_flight: deque[tuple[torch.cuda.Event, MicroBatch]] = deque()

    def stage(self, batch: MicroBatch) -> MicroBatch:
        """Put the tensors that are not in pinned memory there, so that `move` need not wait."""
        if not self._cuda:
            return batch
        with torch.cuda.device(self.device):  # a new thread would use device 0
            for name, value in batch.items():
                if isinstance(value, torch.Tensor) and not value.is_pinned():
                    batch[name] = value.pin_memory()
        return batch

    def move(self, batch: MicroBatch) -> MicroBatch:
        """The batch on the device; kernels queued from now on see it complete."""
        if not self._cuda:
            return batch
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        moved = MicroBatch(batch)
        moved.__dict__.update(batch.__dict__)
        consumer = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    moved[name] = value.to(self.device, non_blocking=True)
                    moved[name].record_stream(consumer)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        consumer.wait_event(copied)
        self._in_flight.append((copied, batch))
        return moved
