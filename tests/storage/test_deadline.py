from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from dataservice.errors import StorageTimeout
from dataservice.storage.deadline import ReaderPool


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Reader threads that other tests' stores have left behind do not count."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


OTHERS: set[threading.Thread] = set()


def reader_threads() -> int:
    readers = {t for t in threading.enumerate() if t.name == "storage-reader"}
    return len(readers - OTHERS)


def wait_for(condition) -> None:
    pause = threading.Event()
    for _ in range(500):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("did not happen within 5 s")


def test_results_and_errors_come_back() -> None:
    pool = ReaderPool(threads=2)
    assert pool.run(lambda: 7, timeout_s=5, what="seven") == 7
    with pytest.raises(KeyError, match="gone"):
        pool.run(lambda: {}["gone"], timeout_s=5, what="key")
    pool.close()
    assert reader_threads() == 0


def test_a_stuck_call_is_left_behind_and_replaced(gate: threading.Event) -> None:
    pool = ReaderPool(threads=1, max_stuck=2)
    for _ in range(2):
        with pytest.raises(StorageTimeout, match=r"read x: no answer within 0.01 s"):
            pool.run(gate.wait, timeout_s=0.01, what="read x")
    assert pool.stuck == 2
    with pytest.raises(StorageTimeout, match="2 reads are stuck"):
        pool.run(lambda: 1, timeout_s=5, what="read y")
    gate.set()
    wait_for(lambda: pool.stuck == 0)
    assert pool.run(lambda: 1, timeout_s=5, what="read z") == 1
    pool.close()
    wait_for(lambda: reader_threads() == 0)


def test_a_call_that_never_started_is_not_run_later(gate: threading.Event) -> None:
    pool = ReaderPool(threads=1)
    busy = threading.Thread(target=lambda: pool.run(gate.wait, timeout_s=5, what="busy"))
    busy.start()
    wait_for(lambda: len(pool._waited_for) == 1)
    ran: list[int] = []
    with pytest.raises(StorageTimeout):
        pool.run(lambda: ran.append(1), timeout_s=0.01, what="late")
    assert pool.stuck == 0
    gate.set()
    busy.join(5)
    assert pool.run(lambda: 2, timeout_s=5, what="next") == 2
    assert ran == []
    pool.close()


def test_close_ends_every_wait(gate: threading.Event) -> None:
    pool = ReaderPool(threads=1)
    ends: list[str] = []

    def read(name: str) -> None:
        with pytest.raises(StorageTimeout) as raised:
            pool.run(gate.wait, timeout_s=60, what=name)
        ends.append(str(raised.value))

    callers = [threading.Thread(target=read, args=(name,)) for name in ("runs", "queued")]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(pool._waited_for) == 2)
    pool.close(timeout_s=0.1)
    for caller in callers:
        caller.join(5)
    assert sorted(ends) == [
        f"{name}: the store was closed meanwhile" for name in ("queued", "runs")
    ]
    gate.set()
    wait_for(lambda: reader_threads() == 0)
    assert pool.stuck == 0


def test_many_callers() -> None:
    pool = ReaderPool(threads=3)
    results: list[int] = []

    def call(number: int) -> None:
        results.extend(pool.run(lambda: number, timeout_s=5, what="n") for _ in range(50))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    assert reader_threads() <= 3
    for caller in callers:
        caller.join(10)
    assert sorted(results) == sorted(list(range(8)) * 50)
    pool.close()


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
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_has_its_own_threads() -> None:
    pool = ReaderPool(threads=1)
    assert pool.run(lambda: 1, timeout_s=5, what="parent") == 1

    def check() -> None:
        assert pool.run(lambda: 2, timeout_s=5, what="child") == 2

    assert in_child(check) == 0
    assert pool.run(lambda: 3, timeout_s=5, what="parent") == 3
    pool.close()
