"""Micro-batches on the trainer's device: the copy, and pixels in the form a vision model reads.

Invariants: copies and normalisation run on a stream of their own, from when the batch is there; the
consumer's stream waits for them, never the CPU; a host buffer is kept until the copy that reads it
has ended, device memory until the consumer's kernels that read it have; on the CPU nothing is
copied; normalised pixels are bit by bit those of `normalize` on the CPU.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataservice.errors import ConfigError
from trainer_client.batch import MicroBatch, VisionInfo

LOG = logging.getLogger(__name__)

Constants = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normalize(batch: MicroBatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`pixel_values` as the model's processor gives them: `(x / 255 - mean) / std`, by channel.

    Returns `dtype` [P, 3 * temporal_patch * patch * patch] on the batch's device, a still picture
    repeated along time; of tiles [P, 3, tile, tile]. Computed in float32, or in float64 when that
    is asked for. In float32 the values are bit by bit those of transformers' PIL image processors
    (and the formula of InternVL's preprocessing). Their torchvision form computes `(x - 255 mean) /
    (255 std)` of pixels that its own resize makes: the formula is up to 2.4e-7 away, the pixels by
    up to 3 in 0.7 % of all bytes (40 photos, transformers 5.24, torchvision 0.28).

    Of a stream that was asked to normalise, the pixels as they are; ConfigError for another dtype.
    """
    pixels, vision = batch["pixel_values"], batch.vision
    if pixels.dtype == dtype:
        return pixels
    if pixels.dtype != torch.uint8:
        raise ConfigError(
            f"pixel_values are normalised to {pixels.dtype} already, and {dtype} is asked for: "
            f"open the PackStream with normalize={dtype}, or without"
        )
    return _normalized(pixels, vision, dtype, _constants(vision, dtype, pixels.device))


def _constants(vision: VisionInfo, dtype: torch.dtype, device: torch.device) -> Constants:
    """255, mean and std by channel. Making them waits for the device's current stream."""
    work = torch.float64 if dtype == torch.float64 else torch.float32

    def by_channel(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=work, device=device).view(1, -1, 1)

    return by_channel([255.0]), by_channel(vision.mean), by_channel(vision.std)


def _normalized(
    pixels: torch.Tensor, vision: VisionInfo, dtype: torch.dtype, constants: Constants
) -> torch.Tensor:
    most, mean, std = constants
    area = vision.side**2
    levels = pixels.view(len(pixels), len(vision.mean), area)
    # Three roundings, as there: a product with 1 / 255, or two steps in one, would give others.
    values = torch.div(levels, most).sub_(mean).div_(std).to(dtype)
    if vision.tile:
        return values.view(len(pixels), len(vision.mean), vision.tile, vision.tile)
    repeated = values.unsqueeze(2).expand(-1, -1, vision.temporal_patch, -1)
    return repeated.reshape(len(pixels), len(vision.mean) * vision.temporal_patch * area)


def usable_device(device: str | torch.device) -> torch.device:
    """With its number, of CUDA the current one; ConfigError where torch sees no CUDA device."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return wanted
    if not torch.cuda.is_available():
        raise ConfigError(f'device="{device}": torch sees no CUDA device; use device="cpu"')
    return torch.device("cuda", torch.cuda.current_device()) if wanted.index is None else wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A copy under way, and on the CPU the batch itself."""

    batch: MicroBatch
    done: torch.cuda.Event | None = None


class DeviceCopier:
    """Brings micro-batches to one device: `stage`, `start`, `finish`. Safe across threads; only
    `finish` is for the thread that computes."""

    def __init__(
        self, device: str | torch.device, *, normalize_to: torch.dtype | None = None
    ) -> None:
        self._dtype = normalize_to
        if normalize_to is not None and not normalize_to.is_floating_point:
            raise ConfigError(f"normalize is {normalize_to}, must be a floating-point dtype")
        self.device = usable_device(device)
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self.stream = torch.cuda.Stream(self.device)
            """On which everything here runs."""
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[torch.cuda.Event, MicroBatch]] = deque()
        self._known: dict[VisionInfo, Constants] = {}

    def host_growth(self, vision: VisionInfo) -> int:
        """Bytes of pixels in a staged batch over those received."""
        return 1 if self._cuda else self._growth(vision)

    def device_bytes(self, batch: MicroBatch) -> int:
        """That a staged batch takes on the device when it is there; 0 on the CPU."""
        if not self._cuda:
            return 0
        pixels: int = batch["pixel_values"].nbytes
        return batch.size_bytes + pixels * (self._growth(batch.vision) - 1)

    def _growth(self, vision: VisionInfo) -> int:
        if self._dtype is None:
            return 1
        return self._dtype.itemsize * (1 if vision.tile else vision.temporal_patch)

    def stage(self, batch: MicroBatch) -> MicroBatch:
        """Made ready on the host: in pinned memory, so that `start` need not wait; normalised where
        the CPU is the device."""
        if not self._cuda:
            if self._dtype is not None:
                batch["pixel_values"] = normalize(batch, self._dtype)
            return batch
        with torch.cuda.device(self.device):  # a new thread would use device 0
            for name, value in batch.items():
                if isinstance(value, torch.Tensor) and not value.is_pinned():
                    batch[name] = value.pin_memory()
        return batch

    def start(self, batch: MicroBatch) -> Copy:
        """Queue the copy of a staged batch, and its normalisation behind it."""
        if not self._cuda:
            return Copy(batch=batch)
        moved = MicroBatch(batch)
        moved.__dict__.update(batch.__dict__)
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    moved[name] = value.to(self.device, non_blocking=True)
            if self._dtype is not None:
                moved["pixel_values"] = self._normalize(moved["pixel_values"], batch.vision)
            done = torch.cuda.Event()
            done.record(self.stream)
            self._in_flight.append((done, batch))
        return Copy(batch=moved, done=done)

    def _normalize(self, pixels: torch.Tensor, vision: VisionInfo) -> torch.Tensor:
        assert self._dtype is not None
        if vision not in self._known:
            self._known[vision] = _constants(vision, self._dtype, self.device)
        return _normalized(pixels, vision, self._dtype, self._known[vision])

    def finish(self, copy: Copy) -> MicroBatch:
        """The batch on the device: kernels that the calling thread's current stream is given from
        now on see it complete. Its memory is used again behind what that stream was given up to the
        moment the last tensor on it goes."""
        if copy.done is not None:
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(copy.done)
            for value in copy.batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(consumer)
        return copy.batch

    def move(self, batch: MicroBatch) -> MicroBatch:
        """All three at once."""
        return self.finish(self.start(self.stage(batch)))

    def settle(self) -> None:
        """Wait for the copies under way, so that the host memory they read may go."""
        if not self._cuda:
            return
        try:
            self.stream.synchronize()
        except RuntimeError as error:  # of a kernel of the trainer's, who is told by its own call
            LOG.info("copies to %s ended: %s", self.device, error)
        with self._lock:
            self._in_flight.clear()
