"""An origin that is slow, stalls, fails, cuts reads short or shows what it was: the same packs."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import DATA, demo_config, own_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.scripted_origin import CUT, OLD, ScriptedOrigin

from dataservice.config import Config

JOB = "test"
SIZES = {"dp_size": 2, "micro_steps": 2, "steps": 6}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = demo_config(tmp_path_factory.mktemp("base"))
    clean_run(config, **SIZES)
    return config


def fails_now_and_then(call: str, _: str, before: int) -> object:
    """Every second call is as it should be; the others are, in turn: EIO, ESTALE, a read cut short
    though the file is as long as ever, attributes as a cache shows them until the file is opened
    anew, a slow read."""
    if call == "stat":
        return OLD if before == 0 else None
    turn = before % 10
    if turn in (0, 2):
        number = errno.EIO if turn == 0 else errno.ESTALE
        raise OSError(number, os.strerror(number))
    if turn == 8:
        time.sleep(0.05)
    return {4: CUT, 6: OLD}.get(turn)


def read(base: Config, service: LocalService) -> dict[str, Any]:
    """The status after a run that was proved to be as the undisturbed one."""
    readers = read_ranks(service.endpoint, job=JOB, **SIZES)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
    prove_same(clean_run(base, **SIZES), readers.deliveries)
    time.sleep(0.5)  # until the worker has told its figures
    status = service.status()
    assert not status["holes"]
    return status


def test_an_origin_that_fails_now_and_then(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own_config(base, tmp_path, cache_dir=None)
    with nothing_leaks(), monkeypatch.context() as patch:
        ScriptedOrigin(patch, DATA, fails_now_and_then)
        with LocalService(config) as service:
            (worker,) = read(base, service)["workers"]
    assert worker["storage_retries"] > 0 and worker["storage_stalls"] == 0


def test_copies_of_an_origin_that_fails_now_and_then(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_first(call: str, name: str, before: int) -> object:
        """Longer than a copy has patience; what a stager alone asks for is the stat."""
        if call == "stat" and before < 5:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fails_now_and_then(call, name, before)

    with nothing_leaks(), monkeypatch.context() as patch:
        ScriptedOrigin(patch, DATA, fails_first)
        with LocalService(own_config(base, tmp_path)) as service:
            read(base, service)
            stager = service.stager_when(lambda s: s["copied_shards"] and not s["missing_shards"])
    assert stager["errors"] > 0 and stager["last_error"]
    for copy in (tmp_path / "cache" / "n0").glob("[!.]*"):
        assert copy.read_bytes() == next(DATA.rglob(copy.name[33:])).read_bytes()


def test_an_origin_that_stalls(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that never comes back is given up at its deadline. One that the kernel does not let
    go of, as on a hanging NFS mount, cannot be made here; for a thread that waits it is the same.
    """
    config = own_config(base, tmp_path, cache_dir=None, deadline_s=1.0)
    back = threading.Event()

    def stalls(call: str, name: str, before: int) -> None:
        if call == "read" and name.endswith(".zip") and before < 2:
            back.wait(30)

    with nothing_leaks(), monkeypatch.context() as patch:
        ScriptedOrigin(patch, DATA, stalls)
        with LocalService(config) as service:
            status = read(base, service)
        back.set()
    (worker,) = status["workers"]
    assert worker["storage_stalls"] > 0 and worker["stuck_reads"] > 0
    assert status["counters"]["packs_failed"] > 0
