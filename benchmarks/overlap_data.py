"""The data of `overlap.py`: sources of photos, of text, of hostile pictures and one far away."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

from numpy.random import Generator, Philox
from soak_pictures import damaged, good_pictures

SAMPLES = 1500
"""Of each source; all are read again and again."""
JOB = "overlap"
GOOD, MIXED = "good pictures", "hostile pictures, a slow store"
WEIGHTS = {
    GOOD: {"photos": 3, "text": 1},
    MIXED: {"photos": 3, "text": 2, "hostile": 3, "far": 1},
}
"""By mix: shares of its sources."""


def write_sources(folder: Path, *, corpus: Path | None, hostile: Path | None, seed: int) -> None:
    random = Generator(Philox(seed))
    good = good_pictures(corpus, random)
    bad = [path.read_bytes() for path in sorted(hostile.iterdir())] if hostile else []

    def photo() -> bytes:
        return good[int(random.integers(len(good)))]

    def hostile_one() -> bytes:
        kind = int(random.integers(4))
        if kind == 0:
            return damaged(photo(), random)
        if kind == 1 and bad:
            return bad[int(random.integers(len(bad)))]
        return photo()

    for name, picture in (("photos", photo), ("far", photo), ("hostile", hostile_one)):
        _write(folder, name, picture, random)
    _write(folder, "text", None, random)


def _write(folder: Path, name: str, picture: Callable[[], bytes] | None, random: Generator) -> None:
    lines = []
    source = folder / name
    source.mkdir(parents=True)
    with zipfile.ZipFile(source / "a.zip", "w") as archive:
        for number in range(SAMPLES):
            text = f"{number} " * int(random.integers(5, 120))
            record = {"id": str(number)}
            question = "What?"
            if picture is not None:
                archive.writestr(f"{number}.img", picture())
                record["image"] = f"{number}.img"
                question = f"<image>\n{question}"
            turns = (("human", question), ("gpt", text))
            said = [{"from": who, "value": value} for who, value in turns]
            lines.append(json.dumps({**record, "conversations": said}))
    if picture is None:
        (source / "a.zip").unlink()
    (source / "a.jsonl").write_text("\n".join(lines) + "\n")


def config_text(folder: Path, mix: str) -> str:
    """Of a job over the sources in `folder`."""
    state = folder / mix.partition(" ")[0]
    sources = [
        f"{{name: {name}, weight: {weight}, "
        f"records: {'slow://' if name == 'far' else ''}{folder}/data/{name}/*.jsonl}}"
        for name, weight in WEIGHTS[mix].items()
    ]
    return f"""
job: {JOB}
index_dir: {state}/index
state_dir: {state}/state
sources: [{", ".join(sources)}]
vision: {{max_pixels: 401408}}
plan: {{pack_length: 8192, epochs: endless}}
workers: {{count: 1, min: 1, max: 1, decode_threads: 2, ready_bytes: 512 MiB}}
serving: {{port: 0}}
errors: {{max_hole_share: 1.0, max_holes_in_a_row: 1000000000}}
"""
