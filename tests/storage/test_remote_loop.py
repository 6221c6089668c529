from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from dataservice.storage.remote.loop import LoopThread


async def nothing() -> None:
    pass


def loops() -> int:
    return sum(thread.name == "storage-loop" for thread in threading.enumerate())


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close(nothing)
    assert loops() == 0


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    async def answer() -> int:
        return 7

    async def fail() -> None:
        raise KeyError("gone")

    assert loop.run(answer, timeout_s=5) == 7
    with pytest.raises(KeyError, match="gone"):
        loop.run(fail, timeout_s=5)
    assert loops() == 1


def test_a_call_is_cancelled_at_its_timeout(loop: LoopThread) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        loop.run(hang, timeout_s=0.05)
    assert cancelled.wait(5)


def test_a_timeout_of_the_client_is_its_own(loop: LoopThread) -> None:
    async def time_out() -> None:
        raise TimeoutError("connecting took too long")

    with pytest.raises(TimeoutError, match="connecting took too long"):
        loop.run(time_out, timeout_s=5)


def test_closing_ends_the_calls_that_run() -> None:
    loop = LoopThread()
    started, errors = threading.Event(), []

    async def hang() -> None:
        started.set()
        await asyncio.sleep(60)

    def call() -> None:
        try:
            loop.run(hang, timeout_s=60)
        except TimeoutError as error:
            errors.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(5)
    loop.close(nothing)
    caller.join(5)
    assert errors == ["the store was closed meanwhile"]
    assert loops() == 0
    loop.close(nothing)

    async def too_late() -> None: ...

    with pytest.raises(RuntimeError, match="the store is closed"):
        loop.run(too_late, timeout_s=5)


def test_a_farewell_that_hangs_or_fails_does_not_keep_the_loop() -> None:
    async def hang() -> None:
        await asyncio.sleep(60)

    async def fail() -> None:
        raise OSError("no")

    for farewell in (hang, fail):
        loop = LoopThread()
        loop.run(nothing, timeout_s=5)
        loop.close(farewell, timeout_s=0.5)
        assert loops() == 0


def test_blocking_lookups_run_beside_the_loop(loop: LoopThread) -> None:
    async def look_up() -> str:
        running = asyncio.get_running_loop()
        return await running.run_in_executor(None, lambda: threading.current_thread().name)

    async def fail() -> None:
        await asyncio.get_running_loop().run_in_executor(None, lambda: {}["gone"])

    assert loop.run(look_up, timeout_s=5) == "storage-lookup"
    with pytest.raises(KeyError):
        loop.run(fail, timeout_s=5)
