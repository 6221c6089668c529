"""Checks on one GPU what tests on a CPU cannot: copies, streams and pixels of a PackStream.

    python benchmarks/gpu_check.py [--batches 40] [--compute-ms 120]

Without CUDA it says "no CUDA here" and ends well. Under three minutes otherwise. The packs are made
up and served by a process of their own, which needs grpcio-health-checking.

    pinned      every tensor of a batch waits for its copy in page-locked memory, and the same few
                buffers are used again for all batches; beside it the speed of the copies
    overlap     the copy and normalisation of later batches run while a batch computes, by the times
                of events on both streams; how much of the time the GPU computes, beside a loop that
                copies and normalises on the computing stream
    equality    tensors are bit by bit those on the CPU, raw and normalised to four dtypes, patches
                and tiles; also when copies are slow (the consumer must wait), and when kernels are
                still to read a batch that the loop has let go (its memory must not be used again)
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from figures import Figure, machine, show, show_reached
from gloo_ranks import served_elsewhere

from trainer_client import MicroBatch, PackStream, ParallelLayout, normalize
from trainer_client.device import Copy, DeviceCopier
from trainer_client.testing import FAKE_INFO, FakeService, synthetic_packs

DEVICE = "cuda"
DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16)
LARGE = replace(FAKE_INFO, pack_length=4096, patch=36)
"""Packs of about 20 MB of pixels."""
KINDS = {
    "patches": replace(FAKE_INFO, pack_length=1024, patch=14),
    "tiles": replace(FAKE_INFO, pack_length=1024, tile=32, thumbnail=True, tile_tokens=3),
}
SIDE = 4096
SLOW_MS = 15.0
AHEAD = 6
"""Packs that are prefetched."""
MOST_BUFFERS = AHEAD + 4
"""Beside those prefetched: the batch being received, the trainer's, and those of copies that were
not looked at since they ended."""


# ---- service ------------------------------------------------------------------------------------


def serve(answer: Any, stop: Any, kind: str, count: int) -> None:
    """`kind`: of KINDS, or "large", one pack of 20 MB again and again."""
    if kind == "large":
        info = LARGE
        packs = synthetic_packs(1, seed=5, image_share=1.0, info=info) * count
    else:
        info = KINDS[kind]
        packs = synthetic_packs(count, seed=6, image_share=0.8, info=info)
    with FakeService(packs, info=info, ahead_steps=64) as service:
        answer.send(service.endpoint)
        stop.wait()


# ---- streams ------------------------------------------------------------------------------------


class Watched(DeviceCopier):
    """Notes, by batch, when its copy began and ended on the copier's stream, and from where."""

    def __init__(self, *, normalize_to: torch.dtype | None, delay: Work | None = None) -> None:
        super().__init__(DEVICE, normalize_to=normalize_to)
        self.times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.addresses: set[int] = set()
        self.unpinned: set[str] = set()
        self.copied_bytes = 0
        self._delay = delay

    def start(self, batch: MicroBatch) -> Copy:
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.numel() and not value.is_pinned():
                self.unpinned.add(name)
        self.addresses.add(batch["pixel_values"].data_ptr())
        self.copied_bytes += batch.size_bytes
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if self._delay is not None:
                self._delay.queue()
            began.record(self.stream)
            copy = super().start(batch)
            ended.record(self.stream)
        self.times.append((began, ended))
        return copy


def stream_of(endpoint: str, copier: DeviceCopier | None) -> PackStream:
    """Without a copier, on the CPU."""
    stream = PackStream(
        endpoint,
        job="gpu-check",
        layout=ParallelLayout(),
        micro_steps=1,
        device="cpu" if copier is None else DEVICE,
        prefetch_packs=AHEAD,
        prefetch_bytes=1 << 30,
        timeout_s=60,
    )
    if copier is not None:
        stream._copier = copier
    return stream


class Work:
    """Matrix products that keep the GPU busy for a given time."""

    def __init__(self, milliseconds: float) -> None:
        self._matrix = torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)
        self._times = 10
        self.queue()  # loads the kernels
        self._times = 50
        self._times = max(1, round(50 * milliseconds / self._measured_ms()))

    def _measured_ms(self) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self.queue()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended)

    def queue(self) -> None:
        """On the current stream."""
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix)


# ---- pinned memory, overlap ---------------------------------------------------------------------


@dataclass(kw_only=True)
class Timeline:
    """Milliseconds since the first batch was there."""

    compute: list[tuple[float, float]] = field(default_factory=list)
    copies: list[tuple[float, float]] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Share of the time from the first computation to the end of the last."""
        return sum(b - a for a, b in self.compute) / (self.compute[-1][1] - self.compute[0][0])

    @property
    def overlapped(self) -> float:
        """Share of the copies' time, of those that began after the first computation and before
        the last had ended, during which something computed."""
        first, last = self.compute[0][0], self.compute[-1][1]
        copies = [(a, b) for a, b in self.copies if first <= a < last]
        inside = sum(
            max(0.0, min(b, end) - max(a, start)) for a, b in copies for start, end in self.compute
        )
        whole = sum(b - a for a, b in copies)
        return inside / whole if whole else 0.0


def run(stream: Iterator[MicroBatch], work: Work, copier: Watched | None) -> Timeline:
    """A loop that queues the work of a batch and waits for that of the batch before, as one does
    that reads its loss a step late."""
    origin: torch.cuda.Event | None = None
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for batch in stream:
        if origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        batch["pixel_values"].sum()  # reads what was copied
        work.queue()
        ended.record()
        if events:
            events[-1][1].synchronize()
        events.append((began, ended))
    torch.cuda.synchronize()
    assert origin is not None

    def since(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[Any]:
        return [(origin.elapsed_time(a), origin.elapsed_time(b)) for a, b in pairs]

    return Timeline(compute=since(events), copies=since(copier.times) if copier else [])


def on_the_computing_stream(stream: PackStream) -> Iterator[MicroBatch]:
    """What a loop without the copier does."""
    for batch in stream:
        moved = MicroBatch(batch)
        moved.__dict__.update(batch.__dict__)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(DEVICE)
        moved["pixel_values"] = normalize(moved, torch.bfloat16)
        yield moved


def check_overlap(args: argparse.Namespace) -> list[Figure]:
    work = Work(args.compute_ms)
    with served_elsewhere(serve, "large", args.batches) as (endpoint, _):
        copier = Watched(normalize_to=torch.bfloat16)
        with stream_of(endpoint, copier) as stream:
            ours = run(stream, work, copier)
            peak_device_bytes = stream.stats().peak_device_bytes
        with stream_of(endpoint, None) as stream:
            plain = run(on_the_computing_stream(stream), work, None)
    return [
        *_pinned_figures(args, copier, ours),
        Figure(
            name="copies that ran while something computed",
            value=100 * ours.overlapped,
            unit="% of their time",
            target="at least 90",
            reached=ours.overlapped >= 0.9,
        ),
        Figure(
            name="time that the GPU computed",
            value=100 * ours.busy,
            unit="%",
            target="at least 95",
            reached=ours.busy >= 0.95,
            note=f"copied and normalised on the computing stream, pageable: {100 * plain.busy:.1f}",
        ),
        Figure(
            name="batches on the device ahead of the loop, at most",
            value=peak_device_bytes / 1e6,
            unit="MB",
        ),
    ]


def _pinned_figures(args: argparse.Namespace, copier: Watched, ours: Timeline) -> list[Figure]:
    copy_s = sum(b - a for a, b in ours.copies) / 1000
    return [
        Figure(
            name="tensors outside page-locked memory",
            value=len(copier.unpinned),
            unit="names",
            target="none",
            reached=not copier.unpinned,
            note=", ".join(sorted(copier.unpinned)),
        ),
        Figure(
            name=f"host buffers of pixels for {args.batches} batches",
            value=len(copier.addresses),
            unit="addresses",
            target=f"at most {MOST_BUFFERS}",
            reached=len(copier.addresses) <= MOST_BUFFERS,
        ),
        Figure(
            name="copies, with their normalisation to bfloat16",
            value=copier.copied_bytes / 1e9 / copy_s,
            unit="GB/s of what crosses the bus",
            note=f"{copier.copied_bytes / 1e6 / args.batches:.1f} MB a batch",
        ),
    ]


# ---- equality -----------------------------------------------------------------------------------


def different(batch: MicroBatch, expected: MicroBatch, dtype: torch.dtype | None) -> list[str]:
    """Names of tensors that are not those of the CPU batch, or not where they should be."""
    found = []
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            continue
        right = value
        if name == "pixel_values" and dtype is not None:
            right = normalize(expected, dtype)
        if not batch[name].is_cuda or not torch.equal(batch[name].cpu(), right):
            found.append(name)
    return found


def check_equality(kind: str, batches: int) -> list[Figure]:
    wrong: list[str] = []
    compared = 0
    with served_elsewhere(serve, kind, batches) as (endpoint, _):
        with stream_of(endpoint, None) as stream:
            expected = list(stream)
        for dtype in DTYPES:
            with stream_of(endpoint, Watched(normalize_to=dtype)) as stream:
                for batch, right in zip(stream, expected, strict=True):
                    compared += 1
                    names = different(batch, right, dtype)
                    wrong += [f"{name} of step {right.step} to {dtype}" for name in names]
        late = _late(endpoint, expected)
    return [
        Figure(
            name=f"{kind}: tensors that differ from the CPU's, {compared} batches, "
            f"{len(DTYPES)} forms",
            value=len(wrong),
            unit="tensors",
            target="none",
            reached=not wrong,
            note="; ".join(wrong[:5]),
        ),
        Figure(
            name=f"{kind}: batches read wrongly by a stream that is late, or from a copy that is",
            value=late,
            unit=f"of {2 * len(expected)}",
            target="none",
            reached=late == 0,
        ),
    ]


def _late(endpoint: str, expected: Sequence[MicroBatch]) -> int:
    """Batches whose pixels a consumer with a stream of its own summed to something else."""
    slow = Work(SLOW_MS)
    torch.cuda.synchronize()
    wrong = 0
    for copies_late, reader_late in ((True, False), (False, True)):
        copier = Watched(normalize_to=None, delay=slow if copies_late else None)
        consumer = torch.cuda.Stream()
        sums: list[torch.Tensor] = []
        with stream_of(endpoint, copier) as stream, torch.cuda.stream(consumer):
            for batch in stream:
                if reader_late:
                    slow.queue()
                weights = torch.arange(batch["pixel_values"].numel(), device=DEVICE) % 251 + 1
                sums.append((batch["pixel_values"].flatten().long() * weights).sum())
                del batch
        torch.cuda.synchronize()
        for total, right in zip(sums, expected, strict=True):
            pixels = right["pixel_values"]
            weights = torch.arange(pixels.numel()) % 251 + 1
            wrong += int(total) != int((pixels.flatten().long() * weights).sum())
    return wrong


# ---- all of it ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=40, help="of 20 MB, for overlap")
    parser.add_argument("--compute-ms", type=float, default=120.0, help="of a batch")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA here")
        return 0
    began = time.monotonic()
    print(f"machine:  {machine()}")
    print(f"device:   {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    print(f"versions: Python {platform.python_version()}, torch {torch.__version__}")
    print(f"command:  python {' '.join(sys.argv)}\n")
    figures = []
    for kind in KINDS:
        figures += check_equality(kind, 12)
    figures += check_overlap(args)
    for figure in figures:
        show(figure)
    print(f"duration: {time.monotonic() - began:.0f} s")
    return 0 if show_reached(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
