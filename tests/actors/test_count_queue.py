from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.actors.count_queue import FIRST_PAUSE_S, LONGEST_PAUSE_S, CountQueue, key_of
from dataservice.wire.counting import CountBlock
from dataservice.wire.shards import Shard

A, B = ("a", 1), ("b", 2)


def job(number: int, file: int = 0) -> CountBlock:
    return CountBlock(
        file=file,
        block=number,
        shard=Shard(source="s", name="n", url="u", size_bytes=1, mtime_ns=1),
        offsets=b"",
        lengths=b"",
        beside=(),
    )


def numbers(jobs: list[CountBlock]) -> list[int]:
    return [job.block for job in jobs]


def test_urgent_blocks_come_first_then_the_order_of_need() -> None:
    queue = CountQueue()
    queue.want(map(job, range(6)))
    queue.want([job(4), job(2)], urgent_since=1.0)
    queue.want([job(2), job(9)])
    assert len(queue) == 7
    assert numbers(queue.give(A, 3, 0.0, 2)) == [2, 4, 0]
    assert numbers(queue.give(A, 3, 0.0, 2)) == []
    assert numbers(queue.give(B, 10, 0.0, 2)) == [1, 3, 5, 9]
    queue.done([(0, 2), (0, 0)])
    assert (0, 2) not in queue
    assert numbers(queue.give(A, 3, 0.0, 2)) == []


def test_what_a_worker_did_not_get_or_left_behind_goes_to_another() -> None:
    queue = CountQueue()
    queue.want(map(job, range(4)))
    assert numbers(queue.give(A, 4, 0.0, 2)) == [0, 1, 2, 3]
    queue.held(A, {(0, 1), (0, 3)})
    assert numbers(queue.give(B, 9, 0.0, 2)) == [0, 2]
    assert queue.release({B}) == 2
    assert numbers(queue.give(B, 9, 0.0, 1)) == [1, 3]
    assert queue.release({B}) == 0


def test_what_is_counted_is_given_to_nobody_while_it_is_on_its_way() -> None:
    queue = CountQueue()
    queue.want([job(0), job(1)], urgent_since=0.0)
    queue.give(A, 9, 0.0, 2)
    assert queue.arrived((0, 0))
    assert not queue.arrived((0, 0))
    assert not queue.arrived((0, 7))
    queue.held(A, {(0, 1)})
    assert queue.release({B}) == 1
    assert queue.overdue(9.0, 9, 9.0) == [(0, 1)]
    assert numbers(queue.give(B, 9, 9.0, 2)) == [1]
    queue.failed((0, 0), "the planning process", "not of this block", 9.0)
    assert numbers(queue.give(B, 9, 9.0 + FIRST_PAUSE_S, 2)) == [0]
    queue.done([(0, 0), (0, 1)])
    assert len(queue) == 0


def test_a_failed_block_rests_and_goes_to_another_worker() -> None:
    queue = CountQueue()
    queue.want([job(0)], urgent_since=0.0)
    assert queue.give(A, 1, 0.0, 2)
    queue.failed((0, 0), "a", "away", 0.0)
    assert queue.reason_of([(5, 5), (0, 0)]) == ((0, 0), "away")
    assert queue.reason_of([(5, 5)]) is None
    assert queue.give(B, 1, 0.0, 2) == []
    assert queue.give(A, 1, FIRST_PAUSE_S, 2) == []
    assert numbers(queue.give(B, 1, FIRST_PAUSE_S, 2)) == [0]
    queue.failed((0, 0), "b", "away", 1.0)
    assert queue.give(A, 1, 1.0 + FIRST_PAUSE_S, 2) == []
    assert numbers(queue.give(A, 1, 1.0 + 2 * FIRST_PAUSE_S, 2)) == [0]
    for _ in range(20):
        queue.failed((0, 0), "a", "away", 2.0)
    assert numbers(queue.give(A, 1, 2.0 + LONGEST_PAUSE_S, 1)) == [0]
    queue.failed((1, 1), "a", "never wanted", 2.0)


def test_overdue_blocks_are_those_that_steps_wait_for() -> None:
    queue = CountQueue()
    queue.want([job(0), job(1), job(2)])
    queue.want([job(2)], urgent_since=3.0)
    queue.want([job(1)], urgent_since=5.0)
    assert queue.overdue(2.9, 9, 4.0) == []
    assert queue.overdue(4.0, 9, 9.0) == [(0, 2)]
    assert queue.overdue(6.0, 9, 9.0) == [(0, 2), (0, 1)]
    assert queue.overdue(6.0, 1, 9.0) == [(0, 2)]
    queue.give(A, 1, 7.0, 1)
    assert queue.overdue(6.0, 9, 9.0) == [(0, 2)]
    assert queue.overdue(7.0, 9, 9.0) == [(0, 2), (0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=60))
def test_every_block_is_given_until_it_is_done(steps: list[tuple[int, int]]) -> None:
    """Whatever happens on the way, two workers that stay count all that is wanted."""
    queue = CountQueue()
    wanted: set[tuple[int, int]] = set()
    done: set[tuple[int, int]] = set()
    now = 0.0
    for what, number in steps:
        now += 0.1
        key = key_of(job(number))
        if what == 0:
            queue.want([job(number)])
            wanted.add(key)
        elif what == 1:
            queue.want([job(number)], urgent_since=now)
            wanted.add(key)
        elif what == 2:
            queue.give(A, number, now, 2)
        elif what == 3:
            queue.failed(key, "a", "reason", now)
        elif what == 4:
            queue.held(A, {key})
        elif what == 5:
            queue.release({B})
        else:
            queue.done([key])
            done.add(key)
            wanted.discard(key)
    queue.release(set())
    now += LONGEST_PAUSE_S
    given_out = {key_of(j) for seat in (A, B) for j in queue.give(seat, 99, now, 2)}
    assert given_out == wanted == {key for key in wanted if key in queue}
