"""A stager killed at every system call leaves a directory from which the next one works."""

from __future__ import annotations

import gzip
import os
import signal
import threading
import time
from pathlib import Path

from storage.staging.origins import Origin
from support.alone import run_alone
from support.killpoints import killed_at

from dataservice.storage.objects import ShardReader, staged_name
from dataservice.storage.staging import Copiers, Need, StagingArea

CONTENT = b'{"text": "a record of some length"}\n' * 40
BUDGET = 4 * len(CONTENT) + 400


def needs_of(origin: Origin) -> tuple[list[Need], list[Need]]:
    """What is there first, and what comes then: the second list fits only in place of the first."""
    packed = origin.make_of(
        "p.jsonl.gz",
        gzip.compress(CONTENT),
        next_use=2,
        packing="gz",
        unpacked_bytes=len(CONTENT),
    )
    first = [origin.make_of(f"{n}.jsonl", CONTENT, next_use=9) for n in "abcd"]
    then = [origin.make_of("x.jpg", CONTENT, next_use=1), packed, first[0]]
    return first, then


def stage(cache: Path, needs: list[Need]) -> None:
    with StagingArea(str(cache), budget_bytes=BUDGET, max_bytes_per_s=10**9) as area:
        area.update(needs)
        while area.step():
            pass


def contents(cache: Path) -> dict[str, bytes]:
    return {
        name: (cache / name).read_bytes() for name in os.listdir(cache) if not name.startswith(".")
    }


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    run_alone(kill_at_every_system_call, tmp_path)


def kill_at_every_system_call(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    first, then = needs_of(origin)
    originals = {need.shard.url: Path(need.shard.url).read_bytes() for need in [*first, *then]}
    points, neighbours_saw_all = 0, 0
    while True:
        cache = tmp_path / f"cache{points}"
        stage(cache, first)
        with StagingArea(str(cache), budget_bytes=BUDGET) as neighbour:
            killed = killed_at(points, lambda cache=cache: stage(cache, then))
            for name, content in contents(cache).items():
                assert content == CONTENT, name
            neighbour.update([first[1]])
            while neighbour.step():
                pass
            assert not any(name.startswith(".tmp-") for name in os.listdir(cache))
            neighbours_saw_all += staged_name(first[1].shard) in contents(cache)
        stage(cache, then)
        found = contents(cache)
        assert {staged_name(need.shard) for need in then} <= found.keys()
        assert sum(map(len, found.values())) <= BUDGET
        assert set(found.values()) == {CONTENT}
        assert set(os.listdir(cache)) - found.keys() == {".jobs-1", ".lock", ".rate"}
        assert os.listdir(cache / ".jobs-1") == []
        with ShardReader(str(cache), deadline_s=10) as reader:
            for need in then:
                assert reader.read(need.shard, 3, 50) == CONTENT[3:53]
            assert reader.origin_bytes == 0
        if not killed:
            break
        points += 1
    assert points > 15 and neighbours_saw_all == points + 1
    assert originals == {url: Path(url).read_bytes() for url in originals}


def stage_beside_others(cache: Path, needs: list[Need]) -> None:
    with StagingArea(str(cache), budget_bytes=10**9) as area, Copiers(area):
        area.update(needs)
        while not area.settled(3):
            area.wait(0.01)


def test_two_that_copy_side_by_side_and_one_is_killed(tmp_path: Path) -> None:
    run_alone(kill_one_of_two, tmp_path)


def kill_one_of_two(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    needs = [origin.make_of(f"{n}.jsonl", CONTENT * 300, next_use=n) for n in range(30)]
    killed = 0
    for round_ in range(8):
        cache = tmp_path / f"cache{round_}"
        victim = os.fork()
        if victim == 0:
            stage_beside_others(cache, needs)
            os._exit(0)
        while not cache.is_dir() or not any(cache.glob("[0-9a-f]*-*")):
            time.sleep(0.001)
        killer = threading.Timer(0.004 * round_, os.kill, (victim, signal.SIGKILL))
        killer.start()
        stage_beside_others(cache, needs)
        killer.join()
        killed += os.WIFSIGNALED(os.waitpid(victim, 0)[1])
        found = contents(cache)
        assert set(found) == {staged_name(need.shard) for need in needs}
        assert set(found.values()) == {CONTENT * 300}
        assert not list(cache.glob(".tmp-*"))
    assert killed
