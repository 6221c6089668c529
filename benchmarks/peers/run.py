"""One run of one loader in a process of its own; what happens goes to a pipe, a line an event.

    python -m peers.run SETUP_JSON MEASURE_JSON EVENTS_FD

A measurement takes whole passes over the group's samples, from batch to batch, after a warm-up;
the consumer drops what it gets.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

from peers.work import Batch, Setup

MODULES = {
    "torch": "torch_loader",
    "torch-draft": "torch_loader",
    "webdataset": "web_loader",
    "streaming": "mosaic_loader",
    "energon": "energon_loader",
    "spdl": "spdl_loader",
    "bare": "bare",
    "ours": "service",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    seconds: float
    """At least, and at least one pass."""
    warm_passes: float
    after_s: float
    """How long it goes on behind the measurement, for the memory to be looked at."""
    check: bool = False
    """No measurement: the digests of all pictures and documents of `warm_passes` passes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Totals(NamedTuple):
    samples: int = 0
    images: int = 0
    tokens: int = 0
    packs: int = 0

    def plus(self, batch: Batch) -> Totals:
        images = batch.get("num_images")
        if images is None:
            images = len(batch["image_grid_thw"])
        return Totals(
            self.samples + batch["num_samples"],
            self.images + images,
            self.tokens + batch["num_tokens"],
            self.packs + batch.get("num_packs", 1),
        )

    def minus(self, other: Totals) -> Totals:
        return Totals(*(a - b for a, b in zip(self, other, strict=True)))


class Events:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w")

    def say(self, event: str, **what: Any) -> None:
        line = {"event": event, "at": time.monotonic()} | what
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def measure(batches: Iterator[Batch], setup: Setup, how: Measure, events: Events) -> None:
    totals, begun, began_at, passes = Totals(), Totals(), 0.0, 0
    for batch in batches:
        now = time.monotonic()
        if totals.packs == 0:
            events.say("first")
        totals = totals.plus(batch)
        if not began_at:
            if totals.samples >= how.warm_passes * setup.samples:
                begun, began_at, passes = totals, now, 1
                events.say("begin")
            continue
        if totals.samples - begun.samples < passes * setup.samples:
            continue
        if now - began_at < how.seconds:
            passes += 1
            continue
        events.say("end", seconds=now - began_at, **totals.minus(begun)._asdict())
        break
    until = time.monotonic() + how.after_s
    for _ in batches:
        if time.monotonic() > until:
            return
    raise RuntimeError("the loader ended before the run did")


def digest(batches: Iterator[Batch], setup: Setup, how: Measure, events: Events) -> None:
    pictures: set[int] = set()
    documents: set[int] = set()
    totals = Totals()
    for batch in batches:
        totals = totals.plus(batch)
        pixels, first = batch["pixel_values"].numpy(), 0
        for _, rows, columns in batch["image_grid_thw"].tolist():
            pictures.add(crc32(pixels[first : first + rows * columns].tobytes()))
            first += rows * columns
        bounds = batch["cu_seqlens"].tolist()
        for start, end in pairwise(bounds):
            if batch["doc_ids"][start] >= 0:
                ids, labels = batch["input_ids"][start:end], batch["labels"][start:end]
                documents.add(crc32(labels.numpy().tobytes(), crc32(ids.numpy().tobytes())))
        if totals.samples >= how.warm_passes * setup.samples:
            break
    events.say("digests", pictures=sorted(pictures), documents=sorted(documents))


def main() -> None:
    setup, how = Setup.from_json(sys.argv[1]), Measure(**json.loads(sys.argv[2]))
    events = Events(int(sys.argv[3]))
    module = importlib.import_module(f"peers.{MODULES[setup.loader]}")
    with module.batches(setup, lambda: events.say("started")) as batches:
        (digest if how.check else measure)(batches, setup, how, events)
    events.say("closed")


if __name__ == "__main__":
    main()
