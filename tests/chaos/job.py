"""The job of a chaos run: made-up data behind an origin that can fail, its index, and an
undisturbed run over it.

Invariants: data, index and packs are the same for every run; each node has its own cache directory,
too small for all the data, so that stagers copy and evict without end.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from support import slow_origin
from support.harness import Delivery
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses

from dataservice.config import Config, load_config

JOB = "chaos"
NODES = ("n0", "n1")
MICRO_STEPS = 2
SHARDS, SAMPLES_A_SHARD = 8, 120
INDEX_S = 300.0


def write_data(folder: Path) -> int:
    """Size of its archives in bytes."""
    random = np.random.Generator(np.random.Philox(7))
    folder.mkdir(parents=True)
    total = 0
    for shard in range(SHARDS):
        lines = []
        path = folder / f"shard-{shard}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for number in range(SAMPLES_A_SHARD):
                lines.append(json.dumps(_sample(random, archive, f"{shard}-{number}", number)))
        (folder / f"shard-{shard}.jsonl").write_text("\n".join(lines) + "\n")
        total += path.stat().st_size
    return total


def _sample(
    random: np.random.Generator, archive: zipfile.ZipFile, name: str, number: int
) -> dict[str, Any]:
    text = "word " * int(random.integers(4, 60))
    record: dict[str, Any] = {"id": name}
    asked = text
    if number % 3:
        height, width = (int(side) for side in random.integers(40, 240, 2))
        small = random.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        stored = io.BytesIO()
        Image.fromarray(small).resize((width, height)).save(stored, "JPEG")
        archive.writestr(f"{name}.jpg", stored.getvalue())
        record["image"], asked = f"{name}.jpg", f"<image>\n{text}"
    turns = [("human", asked), ("gpt", f"Answer {name}: {text}")]
    record["conversations"] = [{"from": who, "value": said} for who, said in turns]
    return record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    config: Config
    environment: dict[str, str]
    """Of processes that read the origin."""
    trouble: Path
    """The origin fails while this file is there; see support.slow_origin."""


def make_job(folder: Path, *, cache_dir: Path, seed: int) -> Job:
    size_bytes = write_data(folder / "data")
    trouble = folder / "origin-trouble.json"
    environment = slow_origin.install(folder / "fs", latency_s=0.0, trouble=trouble)
    source = {
        "name": "chaos",
        "records": f"slow://{folder}/data/*.jsonl",
        "images": f"slow://{folder}/data/*.zip",
        "weight": 1,
    }
    settings = {
        "job": JOB,
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": [source],
        "vision": {"max_pixels": 50176},
        "plan": {
            "seed": seed,
            "pack_length": 1024,
            "packer": "lbf",
            "epochs": "endless",
            "lanes": 4,
            "window": 64,
        },
        "staging": {"cache_dir": str(cache_dir), "budget_bytes": size_bytes * 2 // 3},
        "workers": {"count": 3, "decode_threads": 1, "ready_bytes": "32 MiB"},
        "serving": {"port": 0, "lease_s": 2.0, "plan_ahead_steps": 8},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "dataservice.cli", "index", str(path)]
    with (folder / "index.log").open("wb") as log:
        subprocess.run(
            command,
            env=os.environ | environment,
            check=True,
            timeout=INDEX_S,
            stdout=log,
            stderr=log,
        )
    return Job(config=load_config(str(path)), environment=environment, trouble=trouble)


def undisturbed(job: Job, folder: Path, *, packs: int, timeout_s: float) -> list[Delivery]:
    """What 2 ranks get of at least so many packs, with a journal of its own and no staging."""
    dp_size = 2
    config = dataclasses.replace(
        job.config,
        state_dir=str(folder / "state"),
        staging=dataclasses.replace(job.config.staging, cache_dir=None),
    )
    with (
        ServiceProcesses(
            config, folder / "service", workers=2, keep=False, environment=job.environment
        ) as service,
        RankProcesses(
            service.endpoint,
            folder / "ranks",
            job=JOB,
            dp_size=dp_size,
            micro_steps=MICRO_STEPS,
            steps=packs // (dp_size * MICRO_STEPS) + 1,
            prefetch_packs=None,
        ) as ranks,
    ):
        codes = ranks.wait(timeout_s)
        assert set(codes.values()) == {0}, f"the undisturbed run failed: {ranks.errors}"
        return ranks.deliveries()
