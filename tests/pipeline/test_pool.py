from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from dataservice.errors import DeadlineExceeded
from dataservice.pipeline.pool import BuildPools, DeadlinePool

LONG_S = 30.0


@pytest.fixture
def pool() -> Iterator[DeadlinePool]:
    with DeadlinePool(2, name="test") as made:
        yield made


def same(value: object) -> object:
    return value


def test_results_and_errors_reach_the_waiter(pool) -> None:
    jobs = [pool.submit(lambda i=i: i, commit=lambda v: v * 2, deadline_s=LONG_S) for i in range(9)]
    bad = pool.submit(lambda: 1 // 0, commit=same, deadline_s=LONG_S)
    worse = pool.submit(lambda: 1, commit=lambda v: v // 0, deadline_s=LONG_S)
    assert [pool.result(job) for job in jobs] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    for job in (bad, worse):
        with pytest.raises(ZeroDivisionError):
            pool.result(job)
    assert (pool.completed, pool.abandoned, pool.stuck) == (11, 0, 0)


def test_tasks_start_in_order() -> None:
    started = []
    with DeadlinePool(1, name="test") as pool:
        jobs = [
            pool.submit(lambda i=i: started.append(i), commit=same, deadline_s=LONG_S)
            for i in range(20)
        ]
        for job in reversed(jobs):
            pool.result(job)
    assert started == list(range(20))


def test_the_lowest_priority_starts_first() -> None:
    started, gate = [], threading.Event()
    with DeadlinePool(1, name="test") as pool:
        first = pool.submit(gate.wait, commit=same, deadline_s=LONG_S)
        jobs = [
            pool.submit(partial(started.append, place), commit=same, deadline_s=LONG_S, priority=p)
            for place, p in enumerate([(2, 0), (1, 5), (1, 5), (0, 9), (1, 4), ()])
        ]
        taken_back = pool.submit(
            lambda: started.append("taken back"), commit=same, deadline_s=LONG_S, priority=(0,)
        )
        pool.cancel([taken_back])
        gate.set()
        for job in [first, *jobs]:
            pool.result(job)
        assert pool.completed == 7
    assert started == [5, 3, 4, 1, 2, 0]


def test_a_hung_task_is_given_up_never_commits_and_its_thread_is_replaced(pool) -> None:
    release, committed, ended = threading.Event(), [], threading.Event()

    def hang() -> int:
        release.wait(LONG_S)
        return 1

    hung = [pool.submit(hang, commit=committed.append, deadline_s=0.05) for _ in range(2)]
    behind = pool.submit(lambda: "ran", commit=same, deadline_s=LONG_S)
    # Both threads hang, so this ends only because the waiter gives the two up and replaces them.
    assert pool.result(behind) == "ran"
    for job in hung:
        with pytest.raises(DeadlineExceeded, match=r"took longer than 0\.05 s"):
            pool.result(job)
    assert (pool.abandoned, pool.stuck) == (2, 2)
    stuck = [t for t in threading.enumerate() if t.name.startswith("test-")]
    release.set()
    for thread in stuck[:2]:
        thread.join(LONG_S)
    assert committed == []
    assert pool.stuck == 0
    assert pool.result(pool.submit(ended.is_set, commit=same, deadline_s=LONG_S)) is False


def test_a_deadline_counts_from_the_start_not_from_the_queue() -> None:
    gate = threading.Event()
    with DeadlinePool(1, name="test") as pool:
        first = pool.submit(lambda: gate.wait(LONG_S), commit=same, deadline_s=LONG_S)
        second = pool.submit(lambda: "late", commit=same, deadline_s=0.2)
        timer = threading.Timer(0.4, gate.set)
        timer.start()
        assert pool.result(second) == "late"
        assert pool.result(first) is True
        timer.join()


def test_a_commit_under_way_is_let_end() -> None:
    inside, gate = threading.Event(), threading.Event()

    def commit(_: object) -> str:
        inside.set()
        gate.wait(LONG_S)
        return "whole"

    with DeadlinePool(1, name="test") as pool:
        job = pool.submit(lambda: 1, commit=commit, deadline_s=0.01)
        inside.wait(LONG_S)
        threading.Timer(0.1, gate.set).start()
        assert pool.result(job) == "whole"
        assert pool.abandoned == 0


def test_cancel_takes_back_what_has_not_started() -> None:
    gate, ran = threading.Event(), []
    with DeadlinePool(1, name="test") as pool:
        first = pool.submit(lambda: gate.wait(LONG_S), commit=same, deadline_s=LONG_S)
        others = [
            pool.submit(lambda i=i: ran.append(i), commit=same, deadline_s=LONG_S) for i in range(3)
        ]
        pool.cancel([first, *others[:2]])
        gate.set()
        assert pool.result(others[2]) is None
        for job in others[:2]:
            with pytest.raises(RuntimeError, match="cancelled"):
                pool.result(job)
    assert ran == [2]


def test_close_joins_the_threads_and_is_idempotent() -> None:
    with BuildPools(decode_threads=2, read_threads=3) as pools:
        assert {t.name for t in threading.enumerate()} >= {f"read-{i}" for i in range(3)}
    pools.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith(("read-", "decode-"))]
    assert left == []
    with pytest.raises(RuntimeError, match="the read pool is closed"):
        pools.reads.submit(lambda: 1, commit=same, deadline_s=1)


def test_pools_beside_others_have_only_decode_threads_of_their_own() -> None:
    with BuildPools(decode_threads=1, read_threads=1) as pools, pools.beside(2, name="own") as own:
        assert own.reads is pools.reads
        assert own.decodes.num_threads == 2
        assert pools.decodes.num_threads == 1
        assert own.decodes.result(own.decodes.submit(int, commit=same, deadline_s=LONG_S)) == 0
    assert not [t.name for t in threading.enumerate() if t.name.startswith("own-")]


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="num_threads: 0"):
        DeadlinePool(0, name="test")
