from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage.staging.origins import CONTENT, CountingStore, HangingStore

from dataservice.errors import StorageError, StorageTimeout
from dataservice.storage.staging import ranges as module
from dataservice.storage.staging.ranges import CopyStopped, Ranges

SIZE = len(CONTENT)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", SIZE // 10 + 1)


@pytest.fixture
def shard(tmp_path: Path) -> str:
    path = tmp_path / "a.zip"
    path.write_bytes(CONTENT)
    return str(path)


def ranges_of(store: CountingStore, **options: Any) -> Ranges:
    options = {"threads": 8, "deadline_s": 10.0, "stopped": threading.Event()} | options
    return Ranges(store, **options)


@pytest.mark.parametrize("in_order", [True, False])
def test_every_range_comes_once(shard: str, in_order: bool) -> None:
    store = CountingStore()
    came: list[tuple[int, int]] = []
    ranges = ranges_of(store)
    found = list(
        ranges.fetched(
            shard, SIZE, window=3, in_order=in_order, on_range=lambda *news: came.append(news)
        )
    )
    assert b"".join(data for _, data in sorted(found)) == CONTENT
    assert store.reads["a.zip"] == len(found) == 10
    assert sum(size for size, _ in came) == SIZE and came[-1][1] == 0
    if in_order:
        assert [number for number, _ in found] == list(range(10))
    ranges.close()
    store.close()


def blocking(first: str) -> tuple[CountingStore, threading.Event, Callable[[], int]]:
    """A store whose first read waits for the event, and how many reads were asked for."""
    gate = threading.Event()
    asked: list[str] = []

    def before(url: str) -> None:
        asked.append(url)
        if len(asked) == 1:
            gate.wait(10)

    return CountingStore(before), gate, lambda: len(asked)


def test_a_late_range_holds_up_only_those_that_need_order(shard: str) -> None:
    for in_order, expected in ((False, 10), (True, 3)):
        store, gate, asked = blocking(shard)
        ranges = ranges_of(store)
        found: list[int] = []
        fetched = ranges.fetched(shard, SIZE, window=3, in_order=in_order)
        thread = threading.Thread(
            target=lambda fetched=fetched, found=found: found.extend(n for n, _ in fetched)
        )
        thread.start()
        until = time.monotonic() + 5
        while (asked() < expected or len(found) < expected - 3) and time.monotonic() < until:
            time.sleep(0.005)
        assert asked() == expected
        gate.set()
        thread.join(10)
        assert sorted(found) == list(range(10))
        ranges.close()
        store.close()


def test_a_stop_ends_the_wait(shard: str) -> None:
    store, gate, asked = blocking(shard)
    stopped = threading.Event()
    ranges = ranges_of(store, stopped=stopped)
    threading.Timer(0.1, stopped.set).start()
    with pytest.raises(CopyStopped):
        list(ranges.fetched(shard, SIZE, window=2, in_order=True))
    assert asked() < 10
    gate.set()
    ranges.close()
    store.close()


def test_a_shorter_object_is_an_error(shard: str) -> None:
    store = CountingStore()
    ranges = ranges_of(store)
    with pytest.raises(StorageError, match=f"ends at {SIZE}, expected {SIZE + 5}"):
        list(ranges.fetched(shard, SIZE + 5, window=2, in_order=True))
    ranges.close()
    store.close()


def test_a_wedged_read_is_asked_for_again_and_counted(shard: str) -> None:
    class WedgedOnce(CountingStore):
        def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
            if offset == 0 and not stalls:
                raise StorageTimeout(f"read {url} at 0: no answer within {deadline_s} s")
            return super().read(url, offset, size, deadline_s=deadline_s)

    stalls: list[str] = []
    store = WedgedOnce()
    ranges = ranges_of(store, on_stall=stalls.append)
    found = list(ranges.fetched(shard, SIZE, window=2, in_order=True))
    assert b"".join(data for _, data in found) == CONTENT
    assert len(stalls) == 1 and "no answer" in stalls[0]
    ranges.close()
    store.close()

    stalls.clear()
    hanging = HangingStore("a.zip")
    ranges = ranges_of(hanging, on_stall=stalls.append, deadline_s=0.05)
    with pytest.raises(StorageTimeout):
        list(ranges.fetched(shard, SIZE, window=1, in_order=True))
    assert len(stalls) == 2
    ranges.close()
    hanging.close()
