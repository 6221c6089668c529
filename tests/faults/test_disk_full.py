"""A node's disk that is full, or a budget smaller than a shard: packs are read from the origin."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config, own_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same

from dataservice.config import Config

JOB = "test"
SIZES = {"dp_size": 2, "micro_steps": 2, "steps": 6}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = demo_config(tmp_path_factory.mktemp("base"))
    clean_run(config, **SIZES)
    return config


def read(base: Config, service: LocalService) -> None:
    """Proved to be as an undisturbed run."""
    readers = read_ranks(service.endpoint, job=JOB, **SIZES)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
    prove_same(clean_run(base, **SIZES), readers.deliveries)


def left_over(cache: Path) -> list[str]:
    return [name for name in os.listdir(cache / "n0") if name.startswith(".tmp-")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 768 KiB, a third of the data."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_real_disk_without_room(base: Config, small_disk: Path, tmp_path: Path) -> None:
    config = own_config(base, tmp_path, cache_dir=str(small_disk / "cache"))
    with nothing_leaks(), LocalService(config) as service:
        read(base, service)
        stager = service.stager_when(lambda s: s["disk_full"] > 0 and s["cached_shards"] > 0)
        assert stager["read_through_bytes"] > 0
        (worker,) = service.status()["workers"]
        assert worker["read_origin_bytes"] > 0
        (small_disk / "stranger").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
        read(base, service)
    assert not left_over(small_disk / "cache")


@pytest.mark.parametrize("call", ["pwrite", "rename"])
def test_a_disk_that_turns_out_full_in_mid_copy_or_at_its_end(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Copies fail, then there is room again and they are made."""
    config = own_config(base, tmp_path)
    real = getattr(os, call)

    def full(first: Any, *more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if re.match(rf"{tmp_path}/cache/n0/\.tmp-", path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(first, *more)

    with nothing_leaks():
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            service = LocalService(config)
            failed = service.stager_when(lambda s: s["disk_full"] > 0)
            assert failed["cached_shards"] == 0 and "is full" in failed["last_error"]
        began = time.monotonic()
        read(base, service)
        service.stager_when(lambda s: s["cached_shards"] > 0 and not s["missing_shards"])
        print(f"staged again after {time.monotonic() - began:.1f} s")
        service.close()
    assert not left_over(tmp_path / "cache")


def test_a_budget_below_a_shard_is_told_of_at_the_start(
    base: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = own_config(base, tmp_path, budget_bytes=100_000)
    with nothing_leaks(), caplog.at_level(logging.WARNING), LocalService(config) as service:
        (said,) = [text for text in caplog.messages if "staging.budget_bytes" in text]
        assert "is 100,000: 5 of 8 shards, 1,895,913 of 2,028,249 bytes" in said
        assert "the largest is" in said and "text-00000.jsonl with 504,985 bytes" in said
        read(base, service)
        stager = service.stager_when(lambda s: s["read_through_shards"] > 0)
        assert 0 < stager["cached_bytes"] <= 100_000
        (worker,) = service.status()["workers"]
        assert worker["read_origin_bytes"] > 0
