"""Where a worker's CPU time goes: seconds a pack by stage, in a worker at work.

The functions at the seams of the pipeline are watched while one worker, without transport, builds
the packs with one decode thread: each call adds its thread's CPU time to its stage. What is left
of the process' CPU time is its own line: queues, waking up, layout, checks.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decode_loops
from decode_corpus import make_config, pictures_of, planned_packs, source_names, with_pictures
from figures import Figure
from measuring import SPAWN, usable_cores
from reports import Report, aligned

from dataservice.config import Config
from dataservice.core.packspec import PackSpec
from dataservice.pipeline import images, materialize, pictures, texts
from dataservice.pipeline.text import TextRenderer

READ_PICTURE, READ_TEXT = "read pictures", "read and parse records"
DECODE, RESIZE, PATCH = "decode", "resize, first half", "resize, second half, and patches"
TOKENISE, LAYOUT, ENCODE = "tokenise", "layout of tokens", "frames and checksums"
STAGES = (READ_PICTURE, READ_TEXT, DECODE, RESIZE, PATCH, TOKENISE, LAYOUT, ENCODE)
REST = "queues, threads and the rest"
PYTHON = (READ_TEXT, TOKENISE, LAYOUT, REST)
"""Mostly the interpreter's, which runs one thread at a time."""
LIMIT_S = 1800.0


class Watch:
    """CPU seconds by stage; a stage within another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._own = threading.local()

    def watched(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            outer, self._own.inner = getattr(self._own, "inner", 0.0), 0.0
            began = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                spent = time.thread_time() - began
                with self._lock:
                    self.seconds[stage] += spent - self._own.inner
                self._own.inner = outer + spent

        return timed

    def watch(self, owner: Any, name: str, stage: str) -> None:
        setattr(owner, name, self.watched(stage, getattr(owner, name)))


def watch_all() -> Watch:
    watch = Watch()
    watch.watch(pictures, "read_image", READ_PICTURE)
    watch.watch(texts.PackTexts, "_render_all", READ_TEXT)
    watch.watch(TextRenderer, "render_all", TOKENISE)
    watch.watch(materialize, "text_arrays", LAYOUT)
    watch.watch(decode_loops, "sent", ENCODE)
    watch.watch(images, "decode", DECODE)
    watch.watch(images, "prepare_rows", RESIZE)
    prepare = images.prepare_rows

    def prepared(*given: Any, **named: Any) -> Any:
        return watch.watched(PATCH, prepare(*given, **named))

    images.prepare_rows = prepared
    return watch


def stage_seconds(config: Config, specs: Sequence[PackSpec], answer: Any) -> None:
    os.sched_setaffinity(0, usable_cores()[:1])
    watch = watch_all()
    work = decode_loops.worker(config, specs)
    watch.seconds.clear()
    began = time.process_time()
    work()
    watch.seconds[REST] = time.process_time() - began - sum(watch.seconds.values())
    answer.send(dict(watch.seconds))


def in_own_process(config: Config, specs: Sequence[PackSpec]) -> dict[str, float]:
    here, there = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=stage_seconds, args=(config, specs, there))
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            raise SystemExit(f"no result within {LIMIT_S:g} s")
        return here.recv()
    finally:
        process.kill()
        process.join()


def run(corpus: Path, folder: Path, quick: bool) -> Report:
    names = source_names(corpus)
    groups = [("all sources", names), *((n, [n]) for n in with_pictures(corpus, names))]
    figures: list[Figure] = []
    columns = [["", *STAGES, REST, "together", "packs", "images"]]
    for name, sources in groups:
        config = make_config(corpus, sources, folder / f"stages {name}", threads=1)
        specs = planned_packs(config, 40 if quick else 2000)
        runs = [in_own_process(config, specs) for _ in range(1 if quick else 3)]
        best = min(runs, key=lambda seconds: sum(seconds.values()))
        total = sum(best.values())
        python = sum(best.get(stage, 0.0) for stage in PYTHON) / total
        figures.append(
            Figure(
                name=f"share of a worker's CPU that is mostly the interpreter's: {name}",
                value=python,
                unit="",
                note=f"no more than {1 / python:.1f} threads of one process can be busy; what they "
                "lose by waiting for one another, scaling measures",
            )
        )
        cells = [
            f"{1000 * best.get(stage, 0.0) / len(specs):.2f} {best.get(stage, 0.0) / total:4.0%}"
            for stage in (*STAGES, REST)
        ]
        together = f"{1000 * total / len(specs):.2f} 100%"
        columns.append([name, *cells, together, str(len(specs)), str(len(pictures_of(specs)))])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Report(lines=["", "CPU milliseconds a pack, one core", *aligned(rows)], figures=figures)
