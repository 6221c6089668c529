import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from dataservice.actors import waiting
from dataservice.actors.waiting import Changes


def run(test: Callable[[Changes], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Changes()), 10)

    asyncio.run(main())


def later(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_a_topic_wakes_its_own_waiters_and_those_who_wait_for_anything() -> None:
    async def check(changes: Changes) -> None:
        one, other, anything = (
            asyncio.ensure_future(changes.wait(later(), *topic))
            for topic in (("one",), ("other",), ())
        )
        await asyncio.sleep(0)
        changes.notify("one")
        assert await one and await anything
        assert not other.done()
        changes.notify()
        assert await other

    run(check)


def test_other_work_is_done_between_waiters_that_are_woken_together() -> None:
    async def check(changes: Changes) -> None:
        seen: list[str] = []

        async def wait(number: int) -> None:
            assert await changes.wait(later(), "step")
            seen.append(str(number))

        async def other_call() -> None:
            seen.append("call")

        waiters = [asyncio.ensure_future(wait(number)) for number in range(100)]
        await asyncio.sleep(0)
        changes.notify("step")
        call = asyncio.ensure_future(other_call())
        await asyncio.gather(call, *waiters)
        assert seen.index("call") <= 2 * waiting.AT_ONCE
        assert [name for name in seen if name != "call"] == [str(n) for n in range(100)]

    run(check)


def test_gentle_news_wakes_its_own_waiters_one_by_one_and_leaves_time_for_other_work() -> None:
    async def check(changes: Changes) -> None:
        woken_at: dict[str, float] = {}

        async def wait(topic: str) -> None:
            assert await changes.wait(later(), topic)
            woken_at[topic] = time.monotonic()

        topics = [f"worker {number}" for number in range(20)]
        waiters = [asyncio.ensure_future(wait(topic)) for topic in topics]
        other = asyncio.ensure_future(changes.wait(later(), "other"))
        await asyncio.sleep(0)
        changes.notify_gently("nobody's", *topics[:10])
        changes.notify_gently(*topics)
        await asyncio.gather(*waiters)
        assert list(woken_at) == topics
        took = woken_at[topics[-1]] - woken_at[topics[0]]
        assert took >= 0.9 * (len(topics) - 1) * waiting.GAP_S
        assert not other.done()
        changes.notify()
        assert await other
        assert not changes._gently_due

    run(check)


def test_gentle_news_wakes_at_once_who_comes_later() -> None:
    """Nothing is left of it that would hold up the next."""

    async def check(changes: Changes) -> None:
        for _ in range(3):
            waiter = asyncio.ensure_future(changes.wait(later(), "worker"))
            await asyncio.sleep(0)
            changes.notify_gently("worker")
            assert await waiter
            await asyncio.sleep(3 * waiting.GAP_S)

    run(check)


def test_the_time_is_over_without_a_change() -> None:
    async def check(changes: Changes) -> None:
        assert not await changes.wait(later(0.02), "step")
        assert not await changes.wait(later(-1.0))
        assert not changes._waiting

    run(check)


@pytest.mark.parametrize("first", ["change", "deadline"])
def test_a_change_at_the_deadline_ends_the_wait_once(first: str) -> None:
    """And nothing is left that would end the caller's next wait: a call that waits so is answered
    with an error else."""

    async def check(changes: Changes) -> None:
        until = later(0.02)
        waiter = asyncio.ensure_future(changes.wait(until))
        await asyncio.sleep(0)
        if first == "change":
            changes.notify()
        while time.monotonic() <= until:
            time.sleep(0.001)  # the loop is held up past the deadline
        if first == "deadline":
            changes.notify()
        await waiter
        assert waiter.cancelling() == 0
        await asyncio.sleep(0.01)

    run(check)


def test_a_waiter_that_is_cancelled_leaves_nothing() -> None:
    async def check(changes: Changes) -> None:
        waiter = asyncio.ensure_future(changes.wait(later(), "step"))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not changes._waiting
        changes.notify("step")

    run(check)
