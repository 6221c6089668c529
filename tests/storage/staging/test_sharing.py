"""Threads, areas and processes that share one cache directory."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from storage.staging.origins import CountingStore, Origin, run

from dataservice.errors import StorageError
from dataservice.storage.objects import staged_name
from dataservice.storage.staging import Copiers, Need, StagingArea
from dataservice.storage.staging.locks import FileLock
from dataservice.storage.staging.throttle import Throttle


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def copies(cache: str) -> set[str]:
    return {name for name in os.listdir(cache) if not name.startswith(".")}


def names(*needs: Need) -> set[str]:
    return {staged_name(need.shard) for need in needs}


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_sixty_four_threads_read_a_shard_from_its_origin_once(cache: str, origin: Origin) -> None:
    need = origin.make("a", 1000)
    store = CountingStore(lambda _: time.sleep(0.05))
    areas = [StagingArea(cache, budget_bytes=10**6, store=store) for _ in range(16)]
    for area in areas:
        area.update([need])
    barrier = threading.Barrier(64)

    def steps(area: StagingArea) -> None:
        barrier.wait()
        while area.step():
            pass

    threads = [threading.Thread(target=steps, args=(areas[i % 16],)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.reads == {"a": 1}
    assert copies(cache) == names(need)
    assert sum(area.figures().copied_shards for area in areas) == 1
    for area in areas:
        area.close()
    store.close()


def test_the_budget_is_of_the_directory(
    cache: str, origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c, d = (origin.make(n, 100, next_use=i) for i, n in enumerate("abcd"))
    with (
        StagingArea(cache, budget_bytes=350) as wide,
        StagingArea(cache, budget_bytes=250) as tight,
    ):
        tight.update([c])
        run(tight)
        wide.update([a, b, d])
        run(wide)
        assert copies(cache) == names(a, b)
        assert "budgets of 350 and 250 bytes" in caplog.text
        tight.close()
        wait_until(lambda: run(wide) >= 0 and copies(cache) == names(a, b, d))


def test_what_another_job_needs_now_is_not_dropped(cache: str, origin: Origin) -> None:
    theirs, late = origin.make("theirs", 100, next_use=0), origin.make("late", 100, next_use=7)
    mine = [origin.make(f"m{i}", 100, next_use=i) for i in (0, 1, 2)]
    with StagingArea(cache, budget_bytes=300) as other, StagingArea(cache, budget_bytes=300) as own:
        other.update([theirs, late])
        run(other)
        own.update(mine)
        run(own)
        assert copies(cache) == names(theirs, *mine[:2])
        other.update([])
        run(other)
        wait_until(lambda: run(own) >= 0 and copies(cache) == names(*mine))


def hold(cache: str, needs: list[Need]) -> None:
    area = StagingArea(cache, budget_bytes=300)
    area.update(needs)
    run(area)
    time.sleep(60)


def test_the_needs_of_a_dead_job_count_no_more(cache: str, origin: Origin) -> None:
    theirs = [origin.make(f"t{i}", 100, next_use=0) for i in range(3)]
    mine = [origin.make(f"m{i}", 100, next_use=5) for i in range(3)]

    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(cache, theirs))
    holder.start()
    try:
        wait_until(lambda: os.path.isdir(cache) and len(copies(cache)) == 3)
        with StagingArea(cache, budget_bytes=300) as area:
            area.update(mine)
            run(area)
            assert copies(cache) == names(*theirs)
            holder.kill()
            holder.join(10)
            wait_until(lambda: run(area) >= 0 and copies(cache) == names(*mine))
            assert len(os.listdir(Path(cache) / ".jobs-1")) == 1
    finally:
        holder.kill()
        holder.join(10)
        holder.close()


def stage_all(cache: str, needs: list[Need], log: str) -> None:
    def note(url: str) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(Path(url).name + "\n")
        time.sleep(0.005)

    store = CountingStore(note)
    with StagingArea(cache, budget_bytes=10**6, store=store) as area, Copiers(area):
        area.update(needs)
        wait_until(lambda: names(*needs) <= copies(cache))
    store.close()


def test_two_processes_copy_each_shard_once_between_them(
    cache: str, origin: Origin, tmp_path: Path
) -> None:
    needs = [origin.make(f"{i}", 200 + i, next_use=i) for i in range(40)]
    log = tmp_path / "log"
    spawn = multiprocessing.get_context("spawn")
    orders = [needs, needs[20:] + needs[:20]]
    processes = [spawn.Process(target=stage_all, args=(cache, order, str(log))) for order in orders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(log.read_text().split()) == sorted(need.shard.name for need in needs)
    for need in needs:
        copy = Path(cache) / staged_name(need.shard)
        assert copy.read_bytes() == Path(need.shard.url).read_bytes()


def test_a_stopped_neighbour_is_named_and_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = FileLock(str(path))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match=r"\.lock is locked by another process"), lock.held(0.05):
        pass
    os.close(fd)
    with lock.held(0.05), pytest.raises(StorageError):
        threads_result(lambda: lock.held(0.05).__enter__())
    lock.close()


def threads_result(call: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def catch() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join(10)
    if failed:
        raise failed[0]


def test_a_lock_is_of_the_file_that_has_the_name_now(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    one, two = (FileLock(str(folder / ".lock")) for _ in range(2))
    with one.held(1):
        pass
    folder.rename(tmp_path / "away")
    with two.held(1), pytest.raises(StorageError, match="locked by another process"):
        one.held(0.05).__enter__()
    one.close()
    two.close()


def test_a_job_that_cannot_say_what_it_needs_costs_the_others_nothing(
    cache: str, origin: Origin
) -> None:
    needs = [origin.make(f"{i}", 100) for i in range(3)]
    with StagingArea(cache, budget_bytes=10**6) as one, StagingArea(cache, budget_bytes=400) as two:
        (mine, other) = os.listdir(Path(cache) / ".jobs-1")
        for name in (mine, other):
            (Path(cache) / ".jobs-1" / name).write_bytes(b'{"budget_bytes":1,"us')
        one.update(needs)
        assert run(one) == 3
        two.update(needs)
        assert not run(two)
        assert (one.figures().errors, two.figures().cached_shards) == (0, 3)


def test_a_damaged_copy_that_several_jobs_need_is_made_again(cache: str, origin: Origin) -> None:
    need = origin.make("a", 100)
    path = Path(cache) / staged_name(need.shard)
    with StagingArea(cache, budget_bytes=400) as one, StagingArea(cache, budget_bytes=400) as two:
        for area in (one, two):
            area.update([need])
            run(area)
        os.truncate(path, 7)
        one.update([need])
        assert run(one) == 1
        assert path.stat().st_size == 100


def test_all_jobs_together_keep_to_the_rate(tmp_path: Path) -> None:
    now = [100.0]
    one, two = (
        Throttle(str(tmp_path), max_bytes_per_s=1000, clock=lambda: now[0]) for _ in range(2)
    )
    assert one.claim(550) == 0
    assert two.claim(1000) == pytest.approx(0.5)
    assert one.claim(1000) == pytest.approx(0.5), "who only asked has taken nothing"
    now[0] += 0.5
    assert two.claim(1000) == 0
    assert one.claim(1) == pytest.approx(1.0)
    now[0] += 10
    assert two.claim(1000) == 0
    stopped = threading.Event()
    stopped.set()
    two.take(10**9, stopped)
    two.take(1, stopped)
    one.close()
    two.close()


def test_the_rate_of_an_earlier_run_of_the_machine_does_not_count(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path), max_bytes_per_s=1, clock=lambda: 1e6)
    throttle.claim(10**6)
    throttle.close()
    content = (tmp_path / ".rate").read_bytes()
    (tmp_path / ".rate").write_bytes(b"0" * 36 + content[36:])
    throttle = Throttle(str(tmp_path), max_bytes_per_s=1, clock=lambda: 5.0)
    assert throttle.claim(1) == 0
    throttle.close()


@pytest.mark.parametrize("free_at", [float("nan"), float("inf"), 1e300])
def test_a_damaged_rate_holds_nobody_up(tmp_path: Path, free_at: float) -> None:
    throttle = Throttle(str(tmp_path), max_bytes_per_s=1)
    throttle.claim(1)
    content = (tmp_path / ".rate").read_bytes()
    (tmp_path / ".rate").write_bytes(content[:36] + struct.pack("<d", free_at))
    assert throttle.claim(1) == 0
    throttle.close()


def test_a_throttled_area_takes_its_time(cache: str, origin: Origin) -> None:
    needs = [origin.make(f"{i}", 1000, next_use=i) for i in range(4)]
    with StagingArea(cache, budget_bytes=10**6, max_bytes_per_s=5000) as area:
        area.update(needs)
        before = time.monotonic()
        run(area)
        assert time.monotonic() - before >= 0.4
        assert copies(cache) == names(*needs)
