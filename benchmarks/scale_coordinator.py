"""The coordinator of benchmarks/scale.py in a process of its own: the real one, its gRPC server,
journal and planning process, with a stopwatch at each method and one at the event loop.

Invariants: it says a JSON line when it listens, answers each line of its input with one line of
figures since the line before, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from dataservice.actors import waiting
from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.quiet_gc import keep_gc_quiet
from dataservice.actors.state_log import open_state
from dataservice.config import load_config
from dataservice.rpc.server import start_server

TICK_S = 0.005
WORTH_NOTING_S = 0.002
SLOWEST = 20
_waited: contextvars.ContextVar[list[float]] = contextvars.ContextVar("waited")
METHODS = (
    "open_session",
    "get_steps",
    "report_progress",
    "register_worker",
    "pull_work",
    "get_assignment",
)


class Watch:
    """Seconds of each call without what it waited for a change, and how late the loop ran."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)
        self.late: list[float] = []
        self.collecting_s = 0.0
        self.held: list[tuple[float, str]] = []

    def timed(self, name: str, method: Callable[[Any], Awaitable[Any]]) -> Any:
        @functools.wraps(method)
        async def call(request: Any) -> Any:
            waited = [0.0]
            _waited.set(waited)
            began = time.perf_counter()
            try:
                return await method(request)
            finally:
                self.calls[name].append(time.perf_counter() - began - waited[0])

        return call

    def exclude_waits(self) -> None:
        plain = waiting.Changes.wait

        async def wait(changes: Any, *args: Any, **more: Any) -> bool:
            began = time.perf_counter()
            try:
                return await plain(changes, *args, **more)
            finally:
                waited = _waited.get(None)
                if waited is not None:
                    waited[0] += time.perf_counter() - began

        waiting.Changes.wait = wait  # type: ignore[method-assign]

    def time_callbacks(self) -> None:
        """CPU time of each callback of the event loop that is worth noting; costs a tenth more."""
        plain = asyncio.Handle._run

        def run(handle: Any) -> None:
            began = time.thread_time()
            plain(handle)
            held = time.thread_time() - began
            if held > WORTH_NOTING_S:
                collected = f", {self.collecting_s * 1000:.0f} ms of it in gc"
                self.held.append((held, str(handle._callback)[:160] + collected))
            self.collecting_s = 0.0

        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, _found: dict[str, int]) -> None:
        now = time.thread_time()
        self.collecting_s += -now if phase == "start" else now

    async def watch_loop(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.late.append(time.perf_counter() - began - TICK_S)

    def taken(self) -> dict[str, Any]:
        calls, self.calls = self.calls, defaultdict(list)
        late, self.late = self.late, []
        held, self.held = self.held, []
        return {"calls": calls, "late": late, "held": sorted(held, reverse=True)[:SLOWEST]}


async def main(config_path: str, slowest: int) -> None:
    config = load_config(config_path)
    planner = PlannerProcess()
    watch = Watch()
    watch.exclude_waits()
    if slowest:
        watch.time_callbacks()
    coordinator = Coordinator(config, planner, open_state(config))
    for name in METHODS:
        setattr(coordinator, name, watch.timed(name, getattr(coordinator, name)))
    server = await start_server(coordinator=coordinator)
    await coordinator.start()
    keep_gc_quiet()
    watching = asyncio.ensure_future(watch.watch_loop())
    process: Any = planner._process
    say({"endpoint": server.endpoint, "planner": process.pid})
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while await lines.readline():
        session = coordinator.shared.session
        say(
            {
                **watch.taken(),
                "session": session.generation if session else 0,
                "counters": dict(coordinator.shared.counters),
                "done_step": session.done_step if session else 0,
                "next_step": session.next_step if session else 0,
            }
        )
    watching.cancel()
    await server.stop(0)
    await coordinator.stop()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
