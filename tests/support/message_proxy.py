"""Stands before a coordinator and passes messages on: late, twice, or with the answer lost, as no
proxy of bytes can, and with other endpoints of workers.

Invariants: one thread, joined by `close`; what is broken is drawn from the seed for each kind of
message apart, message by message in the order in which they come.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dataservice.errors import DataServiceError, ServiceUnavailable
from dataservice.rpc.aio import AsyncCoordinatorClient
from dataservice.rpc.security import ServerSecurity
from dataservice.rpc.server import start_server
from dataservice.wire.messages import RegisterWorker
from support.local_service import LoopThread

SLACK_S = 20.0
LATE_S = (0.0, 1.5)


class MessageProxy:
    """Each share is of all messages: `twice` reach the coordinator again at once, `late` again
    after up to LATE_S, behind newer ones, and of `lost` the answer never comes."""

    def __init__(
        self,
        target: str,
        *,
        bind: str = "127.0.0.1:0",
        seed: int = 0,
        twice: float = 0.0,
        late: float = 0.0,
        lost: float = 0.0,
        via: Callable[[str], str] | None = None,
    ) -> None:
        """`via`: a worker's endpoint -> the one that clients are to know it by."""
        self.done: Counter[str] = Counter()
        """"twice", "late" and "lost", so far, and "passed"; and "lost" of each kind."""
        self._seed = seed
        self._random: dict[str, random.Random] = {}
        self._shares = {"twice": twice, "late": late, "lost": lost}
        self._via = via
        self._late: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("message proxy")
        self._client = AsyncCoordinatorClient(target)
        insecure = not bind.startswith("127.")
        self._server = self._thread.run(
            start_server(coordinator=self, bind=bind, security=ServerSecurity(insecure=insecure))  # type: ignore[arg-type]
        )
        self.endpoint = self._server.endpoint

    def heal(self) -> None:
        self._shares = dict.fromkeys(self._shares, 0.0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._answer

    async def _answer(self, request: Any) -> Any:
        if isinstance(request, RegisterWorker) and self._via is not None:
            endpoint = await asyncio.to_thread(self._via, request.endpoint)
            request = replace(request, endpoint=endpoint)
        self.done["passed"] += 1
        kind = type(request).__name__
        late, twice, lost = (self._drawn(what, kind) for what in ("late", "twice", "lost"))
        if late:
            self._late.add(asyncio.ensure_future(self._again(request)))
        answer = await self._pass_on(request)
        if twice:
            answer = await self._pass_on(request)
        if lost:
            self.done[f"lost {kind}"] += 1
            raise ServiceUnavailable("the answer was lost")
        return answer

    def _drawn(self, what: str, kind: str) -> bool:
        source = self._random.setdefault(kind, random.Random(f"{self._seed} {kind}"))
        drawn = source.random() < self._shares[what]
        self.done[what] += drawn
        return drawn

    async def _pass_on(self, request: Any) -> Any:
        return await self._client.call(request, getattr(request, "wait_s", 0.0) + SLACK_S)

    async def _again(self, request: Any) -> None:
        await asyncio.sleep(self._random[type(request).__name__].uniform(*LATE_S))
        try:
            await self._pass_on(request)
        except DataServiceError:
            self.done["late and refused"] += 1

    def close(self) -> None:
        async def end() -> None:
            await self._server.stop(0)
            for task in self._late:
                task.cancel()
            await asyncio.gather(*self._late, return_exceptions=True)
            await self._client.close()

        self._thread.run(end())
        self._thread.close()

    def __enter__(self) -> MessageProxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
