"""Figures of the lazy index: how fast records are found, and that the first step's work does not
grow with the data.

    python -m benchmarks.storage_lazy [--quick]

Two-turn records with the byte tokenizer, in files of 100,000 records in the page cache; times are
wall times of one process with the machine as it is. The first step is of 32 packs of 8,192 tokens,
lanes and window are found as `auto` does.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, PlanSettings, SourceShare
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.lazy import CountingHere, LazyIndex, scan_sources
from dataservice.storage.sources import SourceFiles

FILE_RECORDS = 100_000
GRID = Grid(dp_size=8, micro_steps=4)


def run(quick: bool) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        template = _write_file(data / "0000.jsonl")
        first_steps = []
        for files in (6, 18) if quick else (6, 60):
            for number in range(1, files):
                path = data / f"{number:04d}.jsonl"
                if not path.exists():
                    os.link(template, path)  # the same bytes once more: read and found like others
            found, step = _first_step(data, Path(folder) / f"index{files}", files * FILE_RECORDS)
            figures.append(found)
            first_steps.append(step)
        figures += first_steps
        few, many = first_steps
        figures.append(
            Figure(
                name="lazy index: blocks counted for the first step, at 3 or 10 times the records",
                value=many.value / few.value,
                unit="times as many",
                target="at most 1.3: as many lanes and windows need",
                reached=many.value <= 1.3 * few.value,
            )
        )
    return figures


def _first_step(data: Path, index_dir: Path, records: int) -> tuple[Figure, Figure]:
    renderer = TextRenderer.build(TextSettings(tokenizer="bytes"))
    sources = [SourceFiles(name="text", records=(str(data / "*.jsonl"),))]
    size_bytes = sum(path.stat().st_size for path in data.iterdir())
    began = time.perf_counter()
    scan_sources(sources, str(index_dir), counter=renderer.fingerprint)
    scan_s = time.perf_counter() - began
    index = LazyIndex.open(str(index_dir))
    here = CountingHere(index, sources, renderer)
    index.blocks.on_missing = here.count_all
    index.on_close(here.close)
    began = time.perf_counter()
    plan = Plan(PlanSettings(sources=(SourceShare(name="text"),)), index)
    plan.step(plan.start(), GRID)
    step_s = time.perf_counter() - began
    blocks = index.num_counted()
    index.close()
    mean = size_bytes // records
    return (
        Figure(
            name=f"lazy index: finding {records:,} records",
            value=size_bytes / scan_s / 1e9,
            unit="GB/s",
            target="gigabytes a second",
            reached=size_bytes / scan_s > 1e9,
            note=f"{size_bytes / 1e6:,.0f} MB, {mean} bytes a line, {scan_s:.2f} s",
        ),
        Figure(
            name=f"lazy index: blocks of 64 counted for the first step of {records:,} records",
            value=blocks,
            unit="blocks",
            note=f"{step_s:.2f} s from the open index, in one process",
        ),
    )


def _write_file(path: Path) -> Path:
    with open(path, "w") as file:
        for number in range(FILE_RECORDS):
            question = f"{number} " + "what of this " * (20 + number % 25)
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "yes " * 80}]
            file.write(json.dumps({"id": number, "conversations": turns}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    for figure in run(parser.parse_args().quick):
        reached = {True: "reached", False: "NOT REACHED", None: ""}[figure.reached]
        print(f"{figure.name}: {figure.value:,.2f} {figure.unit}  {figure.note}  {reached}")


if __name__ == "__main__":
    main()
