"""Scaling by hand and a paused client, on a real Ray cluster."""

from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from support.demo_config import demo_config, demo_settings, write_config
from support.harness import Readers, cluster_service, read_ranks, two_streams, worker_pids

from dataservice.actors.launch import Service
from dataservice.cli import main as dataservice
from dataservice.config import Config, load_config
from dataservice.errors import DeadlineExceeded
from dataservice.indexing import update_index

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

JOB = "test"
PAUSE_S = 60.0


def large_pictures(folder: Path, count: int = 24) -> dict[str, Any]:
    """A source of 6 MP photos of smooth noise: much to decode, little to send."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    with zipfile.ZipFile(folder / "large.zip", "w") as archive:
        for number in range(count):
            noise = rng.integers(0, 256, (200, 300, 3), dtype=np.uint8)
            picture = Image.fromarray(noise).resize((3000, 2000), Image.Resampling.BICUBIC)
            data = io.BytesIO()
            picture.save(data, "JPEG", quality=90)
            archive.writestr(f"{number}.jpg", data.getvalue())
            turns = [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": f"Noise number {number}."},
            ]
            lines.append(json.dumps({"image": f"{number}.jpg", "conversations": turns}) + "\n")
    (folder / "large.jsonl").write_text("".join(lines))
    return {"name": "large", "records": str(folder / "large.jsonl"), "weight": 1}


def decode_bound(folder: Path) -> Config:
    settings = demo_settings(
        folder,
        plan={"pack_length": 512, "epochs": "endless", "lanes": 2, "window": 12},
        workers={"count": 1, "decode_threads": 1, "min": 1, "max": 2, "ready_bytes": "8 MiB"},
        vision={"exact": True},  # whole decodes, beside which the readers' work is small
    )
    settings["sources"] = [large_pictures(folder / "data")]
    config = load_config(str(write_config(folder, settings)))
    update_index(config)
    return config


def rate(endpoint: str) -> tuple[float, Readers]:
    """Packs a second that two ranks get, all buffers being full at the start."""
    times: list[float] = []
    lock = threading.Lock()

    def note(_: Any) -> None:
        with lock:
            times.append(time.monotonic())

    readers = read_ranks(
        endpoint, job=JOB, dp_size=2, micro_steps=2, steps=60, on_batch=note, prefetch_packs=2
    )
    kept = sorted(times)[40:]
    return (len(kept) - 1) / (kept[-1] - kept[0]), readers


def test_scale_from_one_worker_to_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster_service(decode_bound(tmp_path), data_nodes=1) as (service, _):
        one, first = rate(service.endpoint)
        with pytest.raises(SystemExit) as ended:
            dataservice(["scale", service.endpoint, "2"])
        assert ended.value.code in (0, None)
        deadline = time.monotonic() + 60
        while len(service.status()["workers"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        two, second = rate(service.endpoint)
        with pytest.raises(SystemExit) as refused:
            dataservice(["scale", service.endpoint, "3"])
        assert refused.value.code == 2
        assert "workers.max" in capsys.readouterr().err
    with capsys.disabled():
        print(f"\none worker {one:.1f} packs/s, two {two:.1f} packs/s, ratio {two / one:.2f}")
    assert first.digests_of_packs() == second.digests_of_packs()
    assert two / one >= 1.6


def worker_rss(service: Service) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in worker_pids(service))


def test_a_client_that_pauses_for_a_minute(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path,
        workers={"count": 1, "decode_threads": 1, "ready_bytes": "6 MiB"},
        serving={"port": 0, "plan_ahead_steps": 6},
    )
    with cluster_service(config) as (service, _):
        pair = two_streams(service.endpoint, job=JOB, prefetch_packs=1, timeout_s=10.0)
        with pair as (paused, other):
            next(paused)
            began = time.monotonic()
            got = 0
            with pytest.raises(DeadlineExceeded, match="rank 0 is at step 0"):
                while True:
                    next(other)
                    got += 1
            assert got == config.serving.plan_ahead_steps * 4
            samples = []
            while time.monotonic() - began < PAUSE_S:
                (worker,) = service.status()["workers"]
                samples.append((worker["ready_bytes"], worker_rss(service)))
                time.sleep(2.0)
            ready = [r for r, _ in samples]
            rss = [m for _, m in samples]
            waits = []
            for _ in range(3):
                before = time.monotonic()
                next(paused)
                waits.append(time.monotonic() - before)
            next(other)
    print(
        f"\nready bytes {min(ready)} to {max(ready)} of {config.workers.ready_bytes}, worker RSS "
        f"{min(rss) >> 20} to {max(rss) >> 20} MiB over {len(samples)} samples; "
        f"next packs after {', '.join(f'{w * 1000:.1f}' for w in waits)} ms"
    )
    assert 0 < min(ready) == max(ready) <= config.workers.ready_bytes
    assert max(rss) - min(rss) < 8 << 20
    assert max(waits) < 0.05
