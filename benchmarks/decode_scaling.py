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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from decode_corpus import (
    make_config,
    pictures_of,
    planned_packs,
    read_pictures,
    source_names,
    with_pictures,
)
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


@dataclass(kw_only=True)
class Scaling:
    name: str
    images: int
    turns: dict[int, list[tuple[Measured, Measured]]]
    """By number of cores: as threads of one process, and as processes."""

    def seconds(self, number: int, which: int) -> float:
        return statistics.median(pair[which].seconds for pair in self.turns[number])

    def share(self, number: int) -> float:
        """Of what processes do, what threads of one process do."""
        return statistics.median(b.seconds / a.seconds for a, b in self.turns[number])

    def rows(self) -> Iterator[list[str]]:
        one = self.seconds(1, 0)
        for number in self.turns:
            yield [
                f"{number} core" + "s" * (number > 1),
                *(
                    cell
                    for seconds in (self.seconds(number, 0), self.seconds(number, 1))
                    for cell in (f"{self.images / seconds:.1f}", f"{one / seconds:.2f}")
                ),
                f"{self.share(number):.2f}",
            ]

    def figure(self) -> Figure:
        good = [number for number in self.turns if self.share(number) >= LEAST_SHARE]
        return Figure(
            name=f"most threads of one process that keep up: {self.name}",
            value=max(good, default=1),
            unit="threads",
            note=f"at least {LEAST_SHARE} of as many processes of one thread; measured up to "
            f"{max(self.turns)}",
        )


def scaling(
    name: str, make: Callable[..., Work], config: Config, specs: Sequence[PackSpec], turns: int
) -> Scaling:
    cores = usable_cores()
    counts = core_counts(len(cores))
    found = Scaling(name=name, images=len(pictures_of(specs)), turns={n: [] for n in counts})
    for turn in range(turns):
        print(f"scaling, {name}: turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
        for number in counts:
            found.turns[number].append(measured(make, config, specs, cores[:number]))
    return found


def run(corpus: Path, folder: Path, quick: bool) -> Report:
    names = source_names(corpus)
    groups = [("all sources", names), *((n, [n]) for n in with_pictures(corpus, names))]
    head = ["", "threads: images/s", "speed-up", "processes: images/s", "speed-up", "threads/proc."]
    report = Report()
    for group, sources in groups:
        config = make_config(corpus, sources, folder / f"scaling {group}", threads=1)
        specs = planned_packs(config, 40 if quick else 2000)
        for name, make in (("decoders", decoders), ("worker", whole_worker)):
            found = scaling(f"{name}, {group}", make, config, specs, 1 if quick else 3)
            report.lines += ["", f"{found.name}: {len(specs)} packs, {found.images} images"]
            report.lines += aligned([head, *found.rows()])
            report.figures.append(found.figure())
    return report
