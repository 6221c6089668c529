"""The same corpus and the same work through other loaders and through us, on the same two cores.

    python benchmarks/peers.py --corpus CORPUS_DIR [--only LOADER ...] [--column same|best]
        [--group all|photos] [--rounds N] [--scale SHARE] [--check] [--json]

The work: read a record and its images, decode, resize to Qwen-VL's size, tokenise (bytes, ChatML),
fill packs of 8,192 tokens, and bring them as tensors to one process that drops them. Two columns:

    same   everyone with our decoder (exact: the pixels of the model's own processor), in order.
           What differs is how the work is spread and carried
    best   everyone at their best: batches in any order where a loader offers that, its own decoder.
           Beside them the bare loop: two processes with our decoder that hand nothing over

torch DataLoader, WebDataset, MosaicML Streaming, Megatron Energon and SPDL each run in the way that
their documentation recommends (see peers/*_loader.py), from files in the form that they need, with
2 workers; we run as `dataservice serve` does it: Ray, coordinator, worker, client. Everything of a
run is pinned to the same two cores.

A run measures whole passes over the group's samples, from a batch to a batch, after a warm-up (a
quarter of a pass; a whole one for ours, which shuffles anew each pass). Runs of ours stand between
those of the others, one for at most four; "ours/it" is the median of the ratios of such neighbours.
After the first round those that are far behind are left out. "MB" is the most memory of all
processes (PSS), "first s" from the start of the trainer to its first batch, "start s" the same with
imports, and with the service's start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from figures import machine, show, show_reached
from peers import environments
from peers.forms import Forms, make_forms
from peers.report import LABELS, Cell, figures, table
from peers.run import Measure
from peers.runs import Result, RunFailed, digests, run
from peers.work import Setup

PEERS = ("torch", "webdataset", "streaming", "energon", "spdl")
LOADERS = {"same": PEERS, "best": (*PEERS[:1], "torch-draft", *PEERS[1:], "bare")}
OWN_PYTHON = ("ours", "bare")
"""These run in our environment."""
WARM_PASSES = {"ours": 1.0}
A_QUARTER = 0.25
CLOSE = 1.15
"""Loaders whose speed is this far below the best one's run in the first round only."""
NEIGHBOURS = 4
"""Loaders for which one run of ours stands, at most."""
AFTER_S = 0.6
CHECK_PASSES = 2.5
CHECK_SAMPLES = 256
"""Besides: what waits in buffers from which packs are chosen."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    def __init__(self, given: argparse.Namespace, forms: Forms) -> None:
        self._given = given
        self._forms = forms
        self.cells = [
            Cell(column=column, group=forms.groups[group])
            for column in given.column
            for group in given.group
        ]

    def measure(self) -> None:
        for number in range(self._given.rounds):
            for cell in self.cells:
                for names in self._turns(cell, number):
                    self._neighbours(cell, names, number)

    def check(self) -> bool:
        """Whether every loader delivers what we do, where everyone has the same decoder."""
        good = True
        for cell in (cell for cell in self.cells if cell.column == "same"):
            want = self._digests(cell, "ours")
            for name in self._loaders(cell):
                found = self._digests(cell, name)
                same = [mine == its for mine, its in zip(want, found, strict=True)]
                good &= all(same)
                counts = [f"{len(a & b)} of {len(a)}" for a, b in zip(want, found, strict=True)]
                print(
                    f"{'ok  ' if all(same) else 'FAIL'} {cell.group.name}, {LABELS[name]}: "
                    f"{counts[0]} pictures, {counts[1]} documents as ours, "
                    f"{sum(len(b - a) for a, b in zip(want, found, strict=True))} others"
                )
        return good

    def _loaders(self, cell: Cell) -> list[str]:
        names = [n for n in LOADERS[cell.column] if not self._given.only or n in self._given.only]
        return [name for name in names if not (self._given.check and name == "bare")]

    def _turns(self, cell: Cell, number: int) -> Iterator[list[str]]:
        """Groups of loaders; ours runs in the middle of each."""
        names = self._loaders(cell)
        if number and not self._given.every_round and cell.results:
            peers = {n: cell.rate(n) for n in names if n in cell.results and n != "bare"}
            best = max(peers.values(), default=0.0)
            names = [n for n in names if n == "bare" or peers.get(n, 0.0) * CLOSE >= best]
        names = [name for name in names if name not in cell.failures]
        if number % 2:
            names.reverse()
        turns = max(1, -(-len(names) // NEIGHBOURS))
        for turn in range(turns):
            yield names[turn * len(names) // turns : (turn + 1) * len(names) // turns]

    def _neighbours(self, cell: Cell, names: Sequence[str], number: int) -> None:
        half = (len(names) + 1) // 2
        ran = {}
        for name in (*names[:half], *(["ours"] if self._wants_ours else []), *names[half:]):
            say(f"round {number + 1}: {cell.column}, {cell.group.name}: {LABELS[name]}")
            result = self._run(cell, name)
            if result is not None:
                ran[name] = result
                cell.results.setdefault(name, []).append(result)
        if "ours" in ran:
            for name in names:
                if name in ran:
                    cell.pairs.setdefault(name, []).append((ran[name], ran["ours"]))

    @property
    def _wants_ours(self) -> bool:
        return not self._given.only or "ours" in self._given.only

    def _run(self, cell: Cell, name: str) -> Result | None:
        how = Measure(
            seconds=self._given.seconds,
            warm_passes=WARM_PASSES.get(name, A_QUARTER),
            after_s=AFTER_S,
        )
        try:
            result = run(
                self._setup(cell, name), how, python=self._python(name), log=self._log(cell, name)
            )
        except RunFailed as error:
            say(f"  failed: {error}")
            cell.failures[name] = str(error)
            return None
        say(
            f"  {result.samples_per_s:.1f} samples/s, {result.images_per_s:.1f} images/s "
            f"in {result.seconds:.1f} s, {result.cores:.2f} cores, "
            f"{result.peak_bytes / 1e6:.0f} MB, first batch {result.first_s:.2f} s"
        )
        return result

    def _digests(self, cell: Cell, name: str) -> tuple[set[int], set[int]]:
        say(f"check: {cell.group.name}: {LABELS[name]}")
        passes = CHECK_PASSES + CHECK_SAMPLES / cell.group.samples
        return digests(
            self._setup(cell, name), passes, python=self._python(name), log=self._log(cell, name)
        )

    def _setup(self, cell: Cell, name: str) -> Setup:
        given = self._given
        return Setup(
            loader=name,
            column=cell.column,
            group=cell.group.name,
            samples=cell.group.samples,
            folder=self._forms.folder,
            prefetch=given.prefetch,
            service_workers=given.service_workers,
            service_threads=given.service_threads,
        )

    def _python(self, name: str) -> Path:
        own = name in OWN_PYTHON
        return Path(sys.executable) if own else environments.peers_python(self._given.work)

    def _log(self, cell: Cell, name: str) -> Path:
        folder: Path = self._given.work / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{cell.column}-{cell.group.name}-{name}.log"


def about(given: argparse.Namespace) -> dict[str, str]:
    from dataservice.pipeline.images import decoder_fingerprint

    names = ("ray", "torch", "numpy", "grpcio", "numba")
    ours = ", ".join(f"{name} {version(name)}" for name in names)
    return {
        "machine": f"{machine()}; all on cores {','.join(map(str, given.cores))}",
        "versions": f"Python {platform.python_version()}; ours: {ours}; "
        f"peers: {environments.peer_versions(given.work)}",
        "decoder": decoder_fingerprint(),
        "service": f"{given.service_workers} worker process of {given.service_threads} decode "
        "threads; the others: 2 worker processes, SPDL 2 decode threads",
        "command": command(),
    }


def command() -> str:
    """As given, but for where the folders lie."""
    words, folders = ["python", "benchmarks/peers.py"], {"--corpus": "CORPUS_DIR", "--work": "DIR"}
    for before, word in pairwise(sys.argv):
        words.append(folders.get(before, word))
    return " ".join(words)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    corpus = os.environ.get("DATASERVICE_CORPUS")
    parser.add_argument("--corpus", type=Path, default=corpus and Path(corpus))
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="kept between runs")
    parser.add_argument("--only", nargs="+", choices=LABELS, default=[], metavar="LOADER")
    parser.add_argument("--column", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--group", nargs="+", choices=("photos", "all"), default=["photos", "all"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-round", action="store_true", help="leave nobody out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples, at random")
    parser.add_argument("--seconds", type=float, default=3.0, help="least length of a measurement")
    parser.add_argument("--prefetch", type=int, default=2, help="the peers', batches a worker")
    parser.add_argument("--service-workers", type=int, default=1)
    parser.add_argument("--service-threads", type=int, default=2)
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")])
    parser.add_argument("--check", action="store_true", help="compare what is delivered, no speed")
    parser.add_argument("--prepare", action="store_true", help="environment and forms, no runs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.corpus is None:
        parser.error("--corpus, or DATASERVICE_CORPUS, must name a corpus")
    given.corpus, given.work = given.corpus.resolve(), given.work.resolve()
    given.cores = given.cores or sorted(os.sched_getaffinity(0))[:2]
    return given


def main() -> int:
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    environments.make(given.work)
    forms = make_forms(given.corpus, given.work, given.scale, say)
    given.group = [name for name in given.group if name in forms.groups]
    environments.warm(given.work)
    if given.prepare:
        return 0
    os.sched_setaffinity(0, given.cores)
    facts, bench = about(given), Bench(given, forms)
    if given.check:
        return 0 if bench.check() else 1
    began = time.monotonic()
    bench.measure()
    found = figures(bench.cells)
    if given.json:
        cells = [asdict(cell) for cell in bench.cells]
        print(json.dumps({**facts, "cells": cells, "figures": [asdict(f) for f in found]}))
        reached = all(figure.reached for figure in found)
    else:
        show_cells(facts, forms, bench.cells, time.monotonic() - began)
        for figure in found:
            show(figure)
        reached = show_reached(found)
    return int(not reached or any(cell.failures for cell in bench.cells))


def show_cells(facts: dict[str, str], forms: Forms, cells: Sequence[Cell], seconds: float) -> None:
    for name, value in facts.items():
        print(f"{name:10}{value}")
    for form in forms.made:
        print(
            f"{'form':10}{form.what} (for {form.needed_by}): {form.seconds:.1f} s, "
            f"{form.size_bytes / 1e6:.1f} MB, not timed below"
        )
    print(f"{'duration':10}{seconds / 60:.1f} minutes")
    for cell in cells:
        print(f"\n{table(cell)}")
    print()


if __name__ == "__main__":
    sys.exit(main())
