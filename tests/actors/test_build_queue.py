import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from dataservice.actors.build_queue import BuildQueue, Job
from dataservice.core.packspec import PackSpec
from dataservice.errors import ServiceUnavailable


def job(
    pack_id: str,
    step: int,
    rank: int,
    *,
    session: int = 1,
    size: int = 100,
    patches: int = 4,
    takers: int = 1,
) -> Job:
    spec = PackSpec(
        pack_id=pack_id, pack_length=8, shards=(), items=(), num_tokens=0, num_patches=patches
    )
    return Job(
        session=session,
        pack_id=pack_id,
        need=(step, 0, rank),
        spec=spec,
        holes={},
        storage_holes=False,
        size_bytes=size,
        takers=takers,
    )


@dataclass
class Packed:
    size_bytes: int


def packed(size: int) -> Any:
    return Packed(size)


def queue(bound: int = 400) -> BuildQueue:
    made = BuildQueue(ready_bytes_bound=bound, on_change=lambda: None)
    made.start_session(1)
    return made


def build(builds: BuildQueue, size: int = 100) -> str:
    taken = builds.take()
    assert taken is not None
    builds.finish(taken, packed(size))
    return taken.pack_id


def taken_or_blocked(builds: BuildQueue, *, text_only: bool = False) -> str | None:
    """What a builder gets within a moment; the queue must be closed by the test afterwards."""
    found: list[Job | None] = []
    thread = threading.Thread(target=lambda: found.append(builds.take(text_only=text_only)))
    thread.start()
    thread.join(0.2)
    if thread.is_alive():
        builds.close()
        thread.join(5)
        return None
    assert found[0] is not None
    return found[0].pack_id


def test_order_of_need() -> None:
    builds = queue()
    for pack_id, step, rank in (("c", 2, 0), ("a", 0, 1), ("b", 1, 0)):
        builds.add(job(pack_id, step, rank))
    assert [build(builds), build(builds), build(builds)] == ["a", "b", "c"]


def test_a_stalled_rank_takes_only_its_share() -> None:
    builds = queue(bound=700)
    for step in range(4):
        builds.add(job(f"stalled{step}", step, 0, size=150))
        builds.add(job(f"quick{step}", step, 1, size=150))
    done = [build(builds, 150) for _ in range(4)]
    assert done == ["stalled0", "quick0", "stalled1", "quick1"]
    builds.served("quick0")
    assert build(builds, 150) == "quick2"
    assert taken_or_blocked(builds) is None
    assert builds.figures()[0] <= 700


def test_a_wanted_pack_is_built_over_the_bound() -> None:
    builds = queue(bound=200)
    builds.add(job("a", 0, 0))
    builds.add(job("b", 1, 0))
    assert build(builds) == "a"
    builds.want("b")
    assert taken_or_blocked(builds) == "b"


def test_text_only_packs_are_built_while_every_other_builder_has_pictures() -> None:
    builds = queue(bound=1000)
    builds.add(*(job(f"picture{step}", step, 0) for step in (0, 2, 4, 6)))
    builds.add(*(job(f"text{step}", step, 0, patches=0, size=10) for step in (5, 3, 1)))
    taken = [builds.take(), builds.take(), builds.take()]
    assert [made.pack_id for made in taken if made] == ["picture0", "text1", "picture2"]
    done = []
    for _ in range(2):
        made = builds.take(text_only=True)
        assert made is not None
        builds.finish(made, packed(10))
        done.append(made.pack_id)
    assert done == ["text3", "text5"]
    assert taken_or_blocked(builds, text_only=True) is None


def test_text_only_packs_leave_the_room_of_earlier_ones() -> None:
    builds = queue(bound=210)
    builds.add(job("picture0", 0, 0), job("picture2", 2, 0))
    builds.add(job("text1", 1, 0, patches=0, size=5), job("text3", 3, 0, patches=0, size=20))
    assert taken_or_blocked(builds, text_only=True) == "text1"
    builds.want("text3")
    assert taken_or_blocked(builds, text_only=True) == "text3"
    builds.unwant("text3")
    builds.add(job("text4", 4, 0, patches=0, size=20))
    assert taken_or_blocked(builds, text_only=True) is None


def test_served_packs_stay_for_peers_while_there_is_room() -> None:
    builds = queue(bound=250)
    for i in range(3):
        builds.add(job(f"p{i}", i, i % 2))
    for i in range(3):
        builds.want(f"p{i}")
        assert build(builds) == f"p{i}"
        builds.unwant(f"p{i}")
        builds.served(f"p{i}")
    assert builds.pack_of("p0") is None
    assert builds.pack_of("p2") is not None


def test_a_new_session_drops_everything_even_what_is_being_built() -> None:
    builds = queue()
    builds.add(job("a", 0, 0))
    taken = builds.take()
    assert taken is not None
    builds.start_session(2)
    builds.finish(taken, packed(1))
    assert builds.pack_of("a") is None and not builds.knows("a")
    builds.add(job("old", 0, 0, session=1))
    assert not builds.knows("old")


def test_finished_steps_are_forgotten() -> None:
    builds = queue()
    builds.add(job("a", 0, 0))
    builds.add(job("b", 1, 1))
    assert build(builds) == "a"
    builds.forget_before(2)
    assert not builds.knows("a") and not builds.knows("b")
    assert builds.figures() == (0, 0, 0)


def test_a_failed_build_reaches_the_waiter_and_may_be_given_again() -> None:
    builds = queue()
    builds.add(job("a", 0, 0))
    taken = builds.take()
    assert taken is not None
    builds.fail(taken, ServiceUnavailable("the disk is gone"))
    with pytest.raises(ServiceUnavailable, match="disk"):
        builds.pack_of("a")
    builds.add(job("a", 0, 0))
    assert build(builds) == "a"
    ready = builds.pack_of("a")
    assert ready is not None and ready.size_bytes == 100


def test_close_lets_builders_go() -> None:
    builds = queue()
    assert taken_or_blocked(builds) is None


def test_only_who_waits_for_a_pack_is_told() -> None:
    told: list[str] = []
    builds = BuildQueue(ready_bytes_bound=400, on_change=lambda: told.append(now))
    builds.start_session(1)
    builds.add(job("a", 0, 0), job("b", 1, 0), job("c", 2, 0))
    now = "a"
    build(builds)
    builds.want("b")
    now = "b"
    build(builds)
    builds.unwant("b")
    builds.want("c")
    now = "c"
    taken = builds.take()
    assert taken is not None
    builds.fail(taken, ServiceUnavailable("no"))
    assert told == ["b", "c"]


def test_a_builder_that_found_no_room_gets_a_pack_that_is_asked_for() -> None:
    builds = queue(bound=100)
    builds.add(job("a", 0, 0), job("b", 1, 0))
    build(builds)
    found: list[Job | None] = []
    thread = threading.Thread(target=lambda: found.append(builds.take()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    builds.want("b")
    thread.join(5)
    assert [taken.pack_id for taken in found if taken is not None] == ["b"]


def test_a_pack_is_kept_until_every_host_has_it() -> None:
    builds = queue(bound=250)
    for step in range(4):
        builds.add(job(f"p{step}", step, 0, takers=2))
    assert [build(builds), build(builds)] == ["p0", "p1"]
    for _ in range(2):  # again, as after a retry: it is the same peer
        builds.served("p0", peer=0)
        builds.served("p1", peer=0)
    assert builds.pack_of("p0") is not None and builds.pack_of("p1") is not None
    builds.served("p0", peer=3)
    assert [build(builds)] == ["p2"]
    assert builds.pack_of("p0") is None  # everybody has it: it gave its room
    assert builds.pack_of("p1") is not None
    assert taken_or_blocked(builds) is None  # p1 waits for the slow host


def test_a_host_that_runs_ahead_grows_no_memory() -> None:
    builds = queue(bound=250)
    for step in range(6):
        builds.add(job(f"p{step}", step, 0, takers=2))
    for step in range(6):
        builds.want(f"p{step}")
        assert build(builds) == f"p{step}"
        builds.served(f"p{step}", peer=0)
        builds.unwant(f"p{step}")
        assert builds.figures()[0] <= 250
    assert builds.pack_of("p0") is not None and not builds.knows("p5")
    builds.add(job("p5", 5, 0, takers=2))
    builds.want("p5")
    assert build(builds) == "p5"
    builds.served("p5", peer=1)
    builds.served("p0", peer=1)
    builds.forget_before(6)
    assert builds.figures() == (0, 0, 0)
    assert not builds._taken_by


def test_what_is_given_back_is_spread_over_the_order_of_need() -> None:
    builds = queue()
    builds.add(*(job(f"p{step}", step, 0) for step in range(10)))
    assert build(builds) == "p0"
    builds.want("p1")
    given = builds.give_back(4)
    assert given == ["p3", "p5", "p7", "p9"]
    assert not any(builds.knows(pack_id) for pack_id in given)
    assert builds.give_back(99) == ["p2", "p4", "p6", "p8"]
    assert builds.give_back(99) == []  # a client waits for p1
    assert builds.figures()[2] == 1
    builds.add(job("p5", 5, 0))  # it comes back when nobody else is left
    assert build(builds) == "p1" and build(builds) == "p5"


def test_time_under_build_counts_every_pack() -> None:
    builds = queue()
    builds.add(job("a", 0, 0), job("b", 1, 0))
    assert builds.busy_s() == 0
    first, second = builds.take(), builds.take()
    assert first is not None and second is not None
    time.sleep(0.1)
    both = builds.busy_s()
    assert 0.2 <= both < 2
    builds.finish(first, packed(1))
    builds.fail(second, ServiceUnavailable("no"))
    done = builds.busy_s()
    time.sleep(0.05)
    assert builds.busy_s() == done >= both
