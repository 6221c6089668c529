"""A node's cache directory is removed or replaced while packs are read from it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from support.demo_config import demo_config, own_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same

JOB = "test"
SIZES = {"dp_size": 2, "micro_steps": 2, "steps": 12}


def test_a_cache_directory_removed_while_it_is_used(tmp_path: Path) -> None:
    base = demo_config(tmp_path / "base")
    clean = clean_run(base, **SIZES)
    cache = tmp_path / "cache" / "n0"
    seen, lock = [0], threading.Lock()

    def remove_twice(_: Any) -> None:
        with lock:
            seen[0] += 1
            if seen[0] == 10:
                shutil.rmtree(cache, ignore_errors=True)
            elif seen[0] == 30:
                cache.rename(tmp_path / "away")

    with nothing_leaks(), LocalService(own_config(base, tmp_path)) as service:
        service.stager_when(lambda s: s["copied_shards"] and not s["missing_shards"])
        readers = read_ranks(
            service.endpoint, job=JOB, **SIZES, on_batch=remove_twice, pause_s=0.05
        )
        away = len(list((tmp_path / "away").glob("[!.]*")))
        copied = service.stager_when(
            lambda s: s["copied_shards"] > away and not s["missing_shards"]
        )["copied_shards"]
        (worker,) = service.status()["workers"]
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s; {copied} copies made")
    prove_same(clean, readers.deliveries)
    assert worker["read_staged_bytes"] > 0
    assert list(cache.glob("[!.]*")) and not list(cache.glob(".tmp-*"))
