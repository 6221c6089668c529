"""How decoding scales over the threads of a process, and over processes, and so how many decode
threads a worker should have.

    decoders   our decoder alone, pictures from memory, plain threads
    worker     a whole worker without transport, with so many decode threads

Each is measured as N threads of one process and as N processes of one thread, on the same N cores,
by turns. The ratio of the two is what sharing one process costs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode_corpus import make_config, pictures_of, planned_packs, read_pictures, source_names
from decode_loops import worker
from figures import Figure
from measuring import Measured, Work, in_processes, usable_cores
from reports import Report, aligned

from dataservice.config import Config
from dataservice.core.packspec import PackSpec
from dataservice.pipeline.images import DecodeLimits, ImageDecoder

LEAST_SHARE = 0.9
"""Of what processes do, below which threads are too many in one process."""


def decoders(config: Config, specs: Sequence[PackSpec], threads: int) -> Work:
    rules = config.plan.vision
    decoder = ImageDecoder(rules, DecodeLimits())
    pictures = list(read_pictures(specs))
    most = max(i.target_width * i.target_height for i, _ in pictures) // rules.patch**2

    def decode(numbers: Any) -> None:
        buffer = np.empty(rules.pixel_shape(most), np.uint8)
        for number in numbers:
            image, data = pictures[number]
            count = image.target_width * image.target_height // rules.patch**2
            decoder.prepare(data, image)(buffer[: rules.pixel_shape(count)[0]])

    decode(range(min(3, len(pictures))))

    def work() -> None:
        numbers = Turns(len(pictures))
        running = [threading.Thread(target=decode, args=(numbers,)) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return work


class Turns:
    """Numbers that threads take by turns."""

    def __init__(self, count: int) -> None:
        self._left, self._lock = iter(range(count)), threading.Lock()

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._left)


def whole_worker(config: Config, specs: Sequence[PackSpec], threads: int) -> Work:
    return worker(replace(config, workers=replace(config.workers, decode_threads=threads)), specs)


def measured(
    make: Callable[..., Work],
    config: Config,
    specs: Sequence[PackSpec],
    cores: Sequence[int],
) -> tuple[Measured, Measured]:
    """As threads of one process, and as processes."""
    number = len(cores)
    together = in_processes(make, [(config, specs, number)], [cores])
    apart = in_processes(
        make, [(config, specs[i::number], 1) for i in range(number)], [[core] for core in cores]
    )
    return together, apart


def core_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and all."""
    powers = itertools.takewhile(lambda n: n < most, (2**i for i in itertools.count()))
    return [*powers, most]


def run(corpus: Path, folder: Path, quick: bool) -> Report:
    cores = usable_cores()
    config = make_config(corpus, source_names(corpus), folder / "scaling", threads=1)
    specs = planned_packs(config, 40 if quick else 2000)
    images = len(pictures_of(specs))
    head = ["", "threads: images/s", "speed-up", "processes: images/s", "speed-up", "threads/proc."]
    report = Report()
    for name, make in (("decoders", decoders), ("worker", whole_worker)):
        counts = core_counts(len(cores))
        turns: dict[int, list[tuple[Measured, Measured]]] = {n: [] for n in counts}
        for turn in range(1 if quick else 3):
            print(f"scaling, {name}: turn {turn + 1}", file=sys.stderr, flush=True)
            for number in counts:
                turns[number].append(measured(make, config, specs, cores[:number]))
        one = statistics.median(together.seconds for together, _ in turns[1])
        rows, shares = [], {}
        for number, pairs in turns.items():
            together = statistics.median(a.seconds for a, _ in pairs)
            apart = statistics.median(b.seconds for _, b in pairs)
            shares[number] = statistics.median(b.seconds / a.seconds for a, b in pairs)
            rows.append(
                [
                    f"{number} core" + "s" * (number > 1),
                    f"{images / together:.1f}",
                    f"{one / together:.2f}",
                    f"{images / apart:.1f}",
                    f"{one / apart:.2f}",
                    f"{shares[number]:.2f}",
                ]
            )
        report.lines += ["", f"{name}: {len(specs)} packs, {images} images"]
        report.lines += aligned([head, *rows])
        good = [n for n, share in shares.items() if share >= LEAST_SHARE]
        report.figures.append(
            Figure(
                name=f"scaling of {name}: most threads of one process that keep up",
                value=max(good, default=1),
                unit="threads",
                note=f"at least {LEAST_SHARE} of as many processes of one thread; "
                f"measured up to {counts[-1]}",
            )
        )
    return report
