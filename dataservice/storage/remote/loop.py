"""An event loop in a thread of its own, for clients of stores that speak asyncio.

Invariants: `run` returns within its timeout and cancels the call then; no thread started here, not
even one that looks a host name up, keeps the process from ending; after a fork the child starts a
loop of its own, and never touches the sockets or the selector that it shares with its parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dataservice.storage.forks import renew_in_children

T = TypeVar("T")

_INHERITED: list[object] = []


def keep_unused(*inherited: object) -> None:
    """For what a forked child must neither use nor collect: to close it would act on its parent."""
    _INHERITED.extend(inherited)


class _DaemonThreads(ThreadPoolExecutor):
    """A daemon thread a call: those of the base class are joined when the process ends."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="storage-lookup", daemon=True).start()
        return future


class LoopThread:
    """Runs coroutines for threads that wait; started by the first call."""

    def __init__(self) -> None:
        self._start_anew()
        renew_in_children(self)

    def after_fork(self) -> None:
        keep_unused(self._loop, self._thread)
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, call: Callable[[], Coroutine[Any, Any, T]], *, timeout_s: float) -> T:
        """The result of the coroutine that `call` makes, or what it raised; TimeoutError."""
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:.3g} s") from None
        except concurrent.futures.CancelledError:
            raise TimeoutError("the store was closed meanwhile") from None

    def close(
        self, farewell: Callable[[], Coroutine[Any, Any, None]], *, timeout_s: float = 2.0
    ) -> None:
        """Runs `farewell` in the loop, then ends it; what hangs is left behind as a daemon."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return

        async def end() -> None:
            try:
                await asyncio.wait_for(farewell(), timeout_s / 2)
            finally:
                loop.stop()

        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join(timeout_s)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(_DaemonThreads())
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="storage-loop", daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=0.5))
    loop.close()
