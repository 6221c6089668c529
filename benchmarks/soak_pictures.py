"""Serves shuffled good, damaged and hostile pictures for a long time and looks for what is left.

    python benchmarks/soak_pictures.py [--minutes 30] [--corpus DIR] [--hostile DIR] [--work DIR]

One source of small records, each with its own picture: of `--corpus` (a folder with zips of
pictures) or made up; one in eight has been cut short or has bytes changed, one in eight is a file
of `--hostile`, where that is given. The service runs on Ray of this machine, one trainer rank reads
eight packs a second, and every five seconds the resident memory of the worker and of this process,
which reads, is noted beside the packs built so far.

Exits with 1 unless the worker's memory is flat (a line through all that follows the first fifth:
under 1 MB a 1,000 packs), no decoder hangs at the end, no worker was replaced, and every hole
stands once in the quarantine file, as the trainer saw it.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Figure, machine, show, show_reached
from numpy.random import Generator, Philox
from PIL import Image

from dataservice.actors.launch import running_service
from dataservice.config import load_config
from dataservice.indexing import update_index
from dataservice.pipeline.decoding.installed import decoder_fingerprint
from trainer_client import PackStream, ParallelLayout

JOB = "soak"
PACKS_A_S = 8.0
"""That the trainer takes."""
SAMPLES_A_MINUTE = 10_000
"""More than it takes, so that no picture is seen twice."""
MOST_PICTURE_BYTES = 150_000
KEPT_PICTURES = 600
SHARD_SAMPLES = 6000
SAMPLE_S = 5.0
WARM_UP = 0.2
MOST_MB_A_1000_PACKS = 1.0


def good_pictures(corpus: Path | None, random: Generator) -> list[bytes]:
    found: list[bytes] = []
    for path in sorted(corpus.rglob("*.zip")) if corpus else []:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if 0 < member.file_size <= MOST_PICTURE_BYTES:
                    found.append(archive.read(member))
    random.shuffle(found)
    return found[:KEPT_PICTURES] or list(_made_up(random))


def _made_up(random: Generator) -> Iterator[bytes]:
    for number in range(200):
        height, width = (int(side) for side in random.integers(40, 700, 2))
        small = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        picture = Image.fromarray(small).resize((width, height))
        stored = io.BytesIO()
        picture.save(stored, ("JPEG", "PNG", "WEBP")[number % 3])
        yield stored.getvalue()


def damaged(data: bytes, random: Generator) -> bytes:
    """Cut short, or with some bytes changed, behind its header."""
    first = min(len(data) - 1, max(len(data) // 4, 600))
    if random.integers(2):
        return data[: int(random.integers(first, len(data)))]
    changed = bytearray(data)
    for _ in range(int(random.integers(1, 20))):
        changed[int(random.integers(first, len(data)))] = int(random.integers(256))
    return bytes(changed)


def write_source(folder: Path, args: argparse.Namespace, num_samples: int) -> None:
    random = Generator(Philox(args.seed))
    good = good_pictures(args.corpus, random)
    hostile = [path.read_bytes() for path in sorted(args.hostile.iterdir())] if args.hostile else []
    folder.mkdir(parents=True)
    for first in range(0, num_samples, SHARD_SAMPLES):
        lines = []
        with zipfile.ZipFile(folder / f"s{first:07}.zip", "w") as archive:
            for number in range(first, min(first + SHARD_SAMPLES, num_samples)):
                kind = int(random.integers(8))
                data = good[int(random.integers(len(good)))]
                if kind == 0:
                    data = damaged(data, random)
                elif kind == 1 and hostile:
                    data = hostile[int(random.integers(len(hostile)))]
                archive.writestr(f"{number}.img", data)
                turns = [("human", "<image>\nWhat is it?"), ("gpt", f"Picture {number}.")]
                said = [{"from": who, "value": text} for who, text in turns]
                record = {"id": str(number), "image": f"{number}.img", "conversations": said}
                lines.append(json.dumps(record))
        (folder / f"s{first:07}.jsonl").write_text("\n".join(lines) + "\n")


def config_text(folder: Path) -> str:
    return f"""
job: {JOB}
index_dir: {folder}/index
state_dir: {folder}/state
sources: [{{name: pictures, records: {folder}/data/*.jsonl}}]
vision: {{max_pixels: 200704}}
plan: {{pack_length: 2048, packer: lbf}}
workers: {{count: 1, min: 1, max: 1, decode_threads: 2, ready_bytes: 64 MiB}}
serving: {{port: 0}}
errors: {{max_hole_share: 1.0, max_holes_in_a_row: 1000000000}}
"""


class Reader(threading.Thread):
    """The trainer: reads all packs until told to stop."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="reader")
        self.packs = 0
        self.holes: set[str] = set()
        self.error: Exception | None = None
        self.stopping = threading.Event()
        self._endpoint = endpoint

    def run(self) -> None:
        try:
            with PackStream(
                self._endpoint,
                job=JOB,
                layout=ParallelLayout.data_parallel(0, 1),
                micro_steps=4,
                device="cpu",
            ) as stream:
                began = time.monotonic()
                for batch in stream:
                    self.packs += len(batch.meta["pack_ids"])
                    self.holes.update(hole.partition(": ")[0] for hole in batch.meta["holes"])
                    if self.stopping.wait(
                        max(0.0, self.packs / PACKS_A_S - time.monotonic() + began)
                    ):
                        return
        except Exception as error:
            self.error = error


class Watch:
    """Rows of (packs built, worker's MB, MB of the reader's process)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []
        self.workers: set[str] = set()
        self._own = psutil.Process()

    def note(self, status: dict[str, Any]) -> None:
        for worker in status["workers"]:
            self.workers.add(worker["id"])
            if worker["memory_bytes"]:
                own = self._own.memory_info().rss / 1e6
                self.rows.append((worker["built_packs"], worker["memory_bytes"] / 1e6, own))

    def slope(self, column: int) -> float:
        """MB a 1,000 packs, without the first fifth of the packs."""
        rows = np.array(self.rows)
        kept = rows[rows[:, 0] >= WARM_UP * rows[-1, 0]]
        return float(np.polyfit(kept[:, 0] / 1000, kept[:, column], 1)[0])


def figures(watch: Watch, reader: Reader, status: dict[str, Any], state: Path) -> list[Figure]:
    lines = (state / "quarantine.jsonl").read_text().splitlines() if reader.holes else []
    rows = [json.loads(line) for line in lines]
    keys = {f"{r['sample']}#{'record' if r['image'] is None else r['image']}" for r in rows}
    stuck = sum(worker["stuck_decodes"] for worker in status["workers"])
    slope = watch.slope(1)
    last = watch.rows[-1]
    unlisted = len(reader.holes - keys)
    return [
        Figure(name="packs built", value=last[0], unit="packs"),
        Figure(name="memory of the worker at the end", value=last[1], unit="MB"),
        Figure(
            name="memory of the worker, growth",
            value=slope,
            unit="MB a 1,000 packs",
            target=f"under {MOST_MB_A_1000_PACKS:g}",
            reached=slope < MOST_MB_A_1000_PACKS,
        ),
        Figure(name="memory of the reader, growth", value=watch.slope(2), unit="MB a 1,000 packs"),
        Figure(
            name="decode threads stuck at the end",
            value=stuck,
            unit="threads",
            target="none",
            reached=stuck == 0,
        ),
        Figure(
            name="workers",
            value=len(watch.workers),
            unit="one after the other",
            target="1",
            reached=len(watch.workers) == 1,
        ),
        Figure(
            name="holes",
            value=len(rows),
            unit="lines of the quarantine file",
            target="each once, and all that the trainer saw",
            reached=len(rows) == len(keys) == status["holes"] > 0 and unlisted == 0,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--hostile", type=Path)
    parser.add_argument("--work", type=Path, help="where the data go (about 200 MB a minute)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"machine:  {machine()}\ndecoder:  {decoder_fingerprint()}")
    print(f"command:  python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory(dir=args.work, prefix="soak-") as name:
        folder = Path(name)
        write_source(folder / "data", args, int(args.minutes * SAMPLES_A_MINUTE))
        (folder / "run.yaml").write_text(config_text(folder))
        config = load_config(folder / "run.yaml")
        update_index(config)
        watch = Watch()
        with running_service(config) as service:
            reader = Reader(service.endpoint)
            reader.start()
            end = time.monotonic() + 60 * args.minutes
            while time.monotonic() < end and reader.is_alive():
                time.sleep(SAMPLE_S)
                watch.note(service.status())
            reader.stopping.set()
            reader.join(60)
            status = service.status()
        if reader.error is not None:
            raise reader.error
        found = figures(watch, reader, status, folder / "state")
    for figure in found:
        show(figure)
    raise SystemExit(0 if show_reached(found) else 1)


if __name__ == "__main__":
    main()
