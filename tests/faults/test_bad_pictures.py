"""A picture that hangs, crashes its process or takes all memory costs one hole and nothing else."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.demo_config import demo_settings, write_config
from support.harness import RESOURCE, Readers, cluster_service, read_ranks
from support.local_service import LocalService
from support.worker_process import WorkerProcesses, codecs_environment

from dataservice.actors.worker_memory import EXIT_CODE
from dataservice.config import Config, load_config
from dataservice.indexing import update_index

JOB = "test"
SAMPLES = 120
BAD = {20: "hang", 40: "sleep", 55: "sleep", 70: "sleep", 90: "abort", 105: "allocate"}
"""Number of a sample, and how its picture misbehaves where the test codecs do."""
DEADLINE_S = 2.0
HANGS = f"decode took longer than {DEADLINE_S:g} s"
MEMORY_BYTES = 900 << 20


def make_source(folder: Path) -> dict[str, Any]:
    """Samples of one small picture each."""
    folder.mkdir(parents=True)
    lines = []
    with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
        for i in range(SAMPLES):
            name = f"codec-{BAD[i]}-{i:03}.png" if i in BAD else f"fine-{i:03}.png"
            height, width = 60 + i % 40, 60 + i % 70
            values = np.arange(height * width * 3, dtype=np.uint32) * (2 * i + 1) >> 4
            stored = io.BytesIO()
            Image.fromarray(values.astype(np.uint8).reshape(height, width, 3)).save(stored, "PNG")
            archive.writestr(name, stored.getvalue())
            turns = [("human", "What is shown here?\n<image>"), ("gpt", f"Picture {i} of many.")]
            said = [{"from": who, "value": text} for who, text in turns]
            lines.append(json.dumps({"id": str(i), "image": name, "conversations": said}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "name": "pictures",
        "records": str(folder / "records.jsonl"),
        "images": str(folder / "pictures.zip"),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("job")
    settings = demo_settings(
        folder,
        plan={"pack_length": 256, "lanes": 2, "window": 20, "epochs": 1},
        staging={"cache_dir": None, "budget_bytes": "1 GiB"},
        serving={"lease_s": 3.0},
        workers={
            "count": 2,
            "resource": RESOURCE,
            "decode_threads": 2,
            "decode_deadline_s": DEADLINE_S,
            "max_image_pixels": 100_000,
            "max_image_bytes": 1 << 20,
            "memory_bytes": MEMORY_BYTES,
        },
        errors={"max_hole_share": 0.2},
    )
    settings["sources"] = [make_source(folder / "data")]
    config = load_config(str(write_config(folder, settings)))
    os.makedirs(config.index_dir, exist_ok=True)
    update_index(config)
    return config


@pytest.fixture(scope="module")
def clean(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    """All packs, where no picture misbehaves."""
    readers, counters, exits = served(base, tmp_path_factory.mktemp("clean"), codecs=[])
    assert (counters.get("holes", 0), exits) == (0, [])
    return readers


def read_all(endpoint: str, *, timeout_s: float = 60.0) -> Readers:
    return read_ranks(endpoint, job=JOB, dp_size=2, micro_steps=1, steps=None, timeout_s=timeout_s)


def served(
    config: Config, folder: Path, *, codecs: Sequence[str], workers: int = 2, ends: int = 0
) -> tuple[Readers, dict[str, int], list[int]]:
    """What the ranks got, the service's counters, and how workers ended by themselves, of which
    `ends` are waited for."""
    config = dataclasses.replace(config, state_dir=str(folder / "state"))
    with (
        LocalService(config, workers=0) as service,
        WorkerProcesses(
            service.endpoint,
            count=workers,
            memory_bytes=config.workers.memory_bytes,
            codecs=codecs,
            folder=folder,
        ) as processes,
    ):
        readers = read_all(service.endpoint)
        until = time.monotonic() + 30.0
        while len(processes.exits) < ends and time.monotonic() < until:
            time.sleep(0.1)
        return readers, service.status()["counters"], list(processes.exits)


def check_holes(
    clean: Readers, disturbed: Readers, counters: dict[str, int], kinds: Sequence[str]
) -> list[str]:
    """The holes, in the order of the samples; asserts that they are all that is different."""
    bad = {f"codec-{kind}-{i:03}.png": kind for i, kind in BAD.items() if kind in kinds}
    assert disturbed.packs_of_step() == clean.packs_of_step()
    holes = {hole for d in disturbed.deliveries for hole in d.holes}
    assert len(holes) == counters["holes"] == len(bad)
    told = [next(hole for hole in holes if name in hole) for name in bad]
    lost = {hole.partition("#")[0] for hole in holes}
    touched = {
        (d.step, pack)
        for d in disturbed.deliveries
        for pack, keys in zip(d.pack_ids, d.sample_keys, strict=True)
        if set(keys) & lost
    }
    before, after = clean.digests_of_packs(), disturbed.digests_of_packs()
    assert {place for place in before if before[place] != after[place]} == touched
    assert len(touched) <= len(bad) < len(before) / 3
    assert not any(d.holes for d in clean.deliveries)
    return told


@pytest.mark.parametrize(
    ("kind", "reason", "ends"),
    [
        ("abort", "the decoder process died (SIGABRT)", [-signal.SIGABRT]),
        ("allocate", "decoding it takes more than 262 MiB of memory", [EXIT_CODE]),
        ("hang", HANGS, []),
    ],
)
def test_one_that_ends_its_worker_costs_one_hole_and_nothing_else(
    base: Config, clean: Readers, tmp_path: Path, kind: str, reason: str, ends: list[int]
) -> None:
    workers = dataclasses.replace(base.workers, decode_deadline_s=2.0 if kind == "hang" else 60.0)
    config = dataclasses.replace(base, workers=workers)
    disturbed, counters, exits = served(config, tmp_path, codecs=[kind], ends=len(ends))
    (hole,) = check_holes(clean, disturbed, counters, [kind])
    assert reason in hole
    assert exits == ends
    assert counters["workers_lost"] == 1
    assert counters["packs_suspected"] >= 1


def test_those_that_hang_cost_a_hole_each_and_too_many_a_new_worker(
    base: Config, clean: Readers, tmp_path: Path
) -> None:
    workers = dataclasses.replace(base.workers, max_stuck_threads=2)
    config = dataclasses.replace(base, workers=workers)
    disturbed, counters, exits = served(config, tmp_path, codecs=["sleep"], workers=1, ends=1)
    holes = check_holes(clean, disturbed, counters, ["sleep"])
    assert all(HANGS in hole for hole in holes)
    assert exits == [0], "it ends by itself, with threads that never will"
    assert counters["workers_retired"] == 1
    assert counters.get("workers_lost", 0) == counters.get("packs_suspected", 0) == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_them_on_ray(
    base: Config, clean: Readers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = sorted(set(BAD.values()))
    for name, value in codecs_environment(kinds).items():
        monkeypatch.setenv(name, value)
    config = dataclasses.replace(base, state_dir=str(tmp_path / "state"))
    with cluster_service(config) as (service, _):
        disturbed = read_all(service.endpoint, timeout_s=200.0)
        counters = service.status()["counters"]
    check_holes(clean, disturbed, counters, kinds)
    assert counters["workers_lost"] >= 1
