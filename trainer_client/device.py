"""Micro-batches on the trainer's device: the copy, and pixels in the form a vision model reads.

Invariants: the consumer's stream waits for the copy, never the CPU; a pinned buffer is kept until
the copy that reads it has ended; on the CPU nothing is copied.
"""

from __future__ import annotations

from collections import deque

import torch

from dataservice.errors import ConfigError
from trainer_client.batch import MicroBatch


def normalize(batch: MicroBatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`pixel_values` as Qwen-VL's processor gives them: `(x / 255 - mean) / std`, by channel.

    Returns `dtype` [P, 3 * temporal_patch * patch * patch] on the batch's device, a still picture
    repeated along time; computed in float32, or in float64 when that is asked for.
    """
    pixels, vision = batch["pixel_values"], batch.vision
    work = torch.float64 if dtype == torch.float64 else torch.float32
    mean = torch.tensor(vision.mean, dtype=work, device=pixels.device).view(1, -1, 1)
    std = torch.tensor(vision.std, dtype=work, device=pixels.device).view(1, -1, 1)
    area = vision.patch * vision.patch
    values = pixels.view(len(pixels), len(vision.mean), area).to(work)
    values = values.sub_(mean * 255).div_(std * 255).to(dtype)
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
        """Put the tensors into pinned memory, so that `move` need not wait."""
        if not self._cuda:
            return batch
        with torch.cuda.device(self.device):  # a new thread would use device 0
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
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
