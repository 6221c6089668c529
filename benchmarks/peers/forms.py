"""All forms of the corpus, made before anything is timed, and what making them took.

Invariants: forms that are there and were made from the same files at the same scale are kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.corpus import Group, write_forms
from peers.environments import convert, environment
from peers.service import write_config

VERSION = 1
"""Grows when the forms change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A form of the whole corpus."""

    what: str
    needed_by: str
    seconds: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forms:
    folder: Path
    groups: dict[str, Group]
    made: list[Made]


def make_forms(corpus: Path, work: Path, scale: float, say: Callable[[str], None]) -> Forms:
    folder = work / f"corpus-{scale:g}"
    stamp, source = folder / "forms.json", _identity(corpus)
    if stamp.exists():
        kept = json.loads(stamp.read_text())
        if kept["source"] == source:
            groups = {name: Group(**group) for name, group in kept["groups"].items()}
            return Forms(folder=folder, groups=groups, made=[Made(**made) for made in kept["made"]])
    say(f"making the forms of the corpus in {folder}")
    groups = {group.name: group for group in write_forms(corpus, folder, scale)}
    made = [_index(folder, groups), *_converted(work, folder, groups)]
    text = {
        "source": source,
        "groups": {name: asdict(group) for name, group in groups.items()},
        "made": [asdict(form) for form in made],
    }
    stamp.write_text(json.dumps(text))
    return Forms(folder=folder, groups=groups, made=made)


def _identity(corpus: Path) -> list[Any]:
    files = sorted(path for path in corpus.rglob("*") if path.suffix in (".jsonl", ".zip"))
    sizes = [[str(p.relative_to(corpus)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return [VERSION, str(corpus), *sizes]


def _index(folder: Path, groups: dict[str, Group]) -> Made:
    seconds, size = 0.0, 0
    for name, group in groups.items():
        config, index_dir = folder / f"service-{name}.yaml", folder / f"index-{name}"
        write_config(config, folder, list(group.sources), index_dir)
        began = time.perf_counter()
        command = [sys.executable, "-m", "dataservice.cli", "index", str(config)]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
        if name == "all":
            seconds, size = time.perf_counter() - began, _size(index_dir)
    return Made(what="index", needed_by="ours", seconds=seconds, size_bytes=size)


def _converted(work: Path, folder: Path, groups: dict[str, Group]) -> list[Made]:
    made = []
    for form, what, needed_by in (
        ("tars", "WebDataset tars with Energon's index", "WebDataset, Energon"),
        ("mds", "MDS shards", "MosaicML Streaming"),
    ):
        for name in groups:
            target = folder / f"{form}-{name}"
            began = time.perf_counter()
            convert(work, form, folder / f"mixed-{name}.jsonl", target)
            if name == "all":
                seconds = time.perf_counter() - began
                made.append(
                    Made(what=what, needed_by=needed_by, seconds=seconds, size_bytes=_size(target))
                )
    return made


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
