"""Readers go on in forked children, whatever the threads of the parent are in the middle of."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from dataservice.core.packspec import ShardRef
from dataservice.storage.forks import renew_in_children
from dataservice.storage.objects import ShardReader, Store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(check) -> int:
    """Exit status of a forked child that runs `check`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_living_objects_are_renewed_in_the_child_alone() -> None:
    class Counted:
        renewed = 0

        def after_fork(self) -> None:
            Counted.renewed += 1

    kept, gone = Counted(), Counted()
    renew_in_children(kept)
    renew_in_children(gone)
    del gone
    gc.collect()

    def check() -> None:
        assert Counted.renewed == 1

    assert status_of(in_child(check)) == 0
    assert Counted.renewed == 0


def test_children_with_many_threads_read_the_right_bytes(tmp_path: Path) -> None:
    shards = []
    for number in range(8):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * 1000)
        stat = path.stat()
        shards.append(
            ShardRef(
                source="s",
                name=str(number),
                url=str(path),
                size_bytes=1000,
                mtime_ns=stat.st_mtime_ns,
            )
        )
    wrong: list[int] = []
    stop = threading.Event()

    def read(reader: ShardReader, seed: int, turns: int) -> None:
        for turn in range(turns):
            number = (seed * 7 + turn * 3) % 8
            if reader.read(shards[number], turn % 990, 5) != bytes([number]) * 5:
                wrong.append(number)

    def read_until_stopped(reader: ShardReader, seed: int) -> None:
        while not stop.is_set():
            read(reader, seed, 20)

    def in_threads(target, *args: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=target, args=(reader, n, *args)) for n in range(8)]
        for thread in threads:
            thread.start()
        return threads

    def check() -> None:
        for thread in in_threads(read, 60):
            thread.join(20)
            assert not thread.is_alive()
        assert wrong == []

    with ShardReader(None, deadline_s=20, store=Store(threads=4)) as reader:
        busy = in_threads(read_until_stopped)
        children = [in_child(check) for _ in range(6)]
        statuses = [status_of(child) for child in children]
        stop.set()
        for thread in busy:
            thread.join(20)
    assert statuses == [0] * 6
    assert wrong == []
