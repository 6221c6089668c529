"""A coordinator that answers operators with what a test puts into it; everybody else is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from dataservice.errors import ConfigError
from dataservice.rpc.server import start_server
from dataservice.wire.draining import Drain, Drained
from dataservice.wire.messages import GetStatus, StatusReport


class FakeCoordinator:
    """Its server runs in a thread of its own while the block lasts; a port once taken stays."""

    def __init__(self, report: dict[str, Any] | None = None) -> None:
        self.report: dict[str, Any] = {} if report is None else report
        self.drains: list[Drain] = []
        self.drained: list[Drained] = []
        """Answers in turn; the last one stays."""
        self.endpoint = ""
        self._bind = "127.0.0.1:0"

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def refuse(_request: object) -> None:
            raise ConfigError(f"{method} is not for operators")

        return refuse

    async def get_status(self, _request: GetStatus) -> StatusReport:
        return StatusReport(status=json.dumps(self.report))

    async def drain(self, request: Drain) -> Drained:
        self.drains.append(request)
        return self.drained.pop(0) if len(self.drained) > 1 else self.drained[0]

    def __enter__(self) -> FakeCoordinator:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        fake: Any = self
        self._server = self._run(start_server(coordinator=fake, bind=self._bind))
        self.endpoint = self._bind = self._server.endpoint
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._server.stop(0))
        del self._server
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


def worker(worker_id: str, **figures: Any) -> dict[str, Any]:
    return {
        "id": worker_id,
        "node": "n" * 56,
        "draining": False,
        "ready_packs": 7,
        "ready_bytes": 5 << 20,
        "queued_packs": 2,
        "images_per_s": 321.0,
        "busy_share": 0.65,
    } | figures


def stager(node: str, **figures: Any) -> dict[str, Any]:
    return {
        "node": node,
        "host": f"host-{node}",
        "cached_bytes": 3_000_000_000,
        "missing_bytes": 1_000_000_000,
        "bytes_per_s": 10_000_000.0,
        "left_s": 100.0,
        "hit_rate": 0.97,
    } | figures


def session(ranks: int, **figures: Any) -> dict[str, Any]:
    return {
        "run_id": "night",
        "done_step": 12,
        "end_step": -1,
        "dp_size": ranks,
        "micro_steps": 4,
        "waited_s": [0.0] * ranks,
        "waited_share": [0.0] * ranks,
        "done": [[12, 0]] * ranks,
        "closed": [False] * ranks,
        "heard_s_ago": [0.5] * ranks,
        "failure": "",
    } | figures


def report(**parts: Any) -> dict[str, Any]:
    return {
        "job": "vlm",
        "state": "serving",
        "verdict": {"level": "ok", "text": "No rank is waiting", "why": ""},
        "rates": {"packs_per_s": 12.0, "steps_per_s": 0.5},
        "holes": 0,
        "worst_shards": {},
        "target_workers": 2,
        "scaling": {"reason": "", "waited_share": 0.0, "busy_share": 0.0},
        "workers": [worker("w0"), worker("w1")],
        "stagers": [],
        "session": session(4),
    } | parts
