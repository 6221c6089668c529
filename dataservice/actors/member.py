"""How a worker or stager belongs to the service: it joins, and asks the coordinator in turn.

Invariants: a lost lease leads to joining anew, a coordinator that is away is waited for; without
one for ORPHAN_S the member gives up, so nothing outlives its service for long.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from dataservice.errors import DeadlineExceeded, LeaseLost, ServiceUnavailable
from dataservice.rpc.aio import AsyncCoordinatorClient
from dataservice.rpc.security import ClientSecurity

_LOG = logging.getLogger(__name__)

PULL_WAIT_S = 3.0
"""Longest time for which the coordinator may hold a question back."""
CALL_TIMEOUT_S = 10.0
RETRY_S = 0.2
"""Between two attempts, half as much or half as much again: many members lose a coordinator at the
same time."""
ORPHAN_S = 120.0


def _pause_s() -> float:
    return RETRY_S * random.uniform(0.5, 1.5)


class Member:
    """`hello` is what it joins with; `joined` gets the coordinator's answer each time it joins."""

    def __init__(
        self,
        coordinator: str,
        *,
        security: ClientSecurity,
        hello: Callable[[], object],
        joined: Callable[[Any], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._client = AsyncCoordinatorClient(coordinator, security)
        self._hello = hello
        self._joined = joined
        self._stopping = stopping

    async def call(self, request: object) -> Any:
        return await self._client.call(request, CALL_TIMEOUT_S)

    async def answers(self, question: Callable[[], object]) -> AsyncGenerator[Any, None]:
        """Joins, then asks `question()` again and again; ends when stopping or orphaned."""
        await self._join()
        heard = time.monotonic()
        while not self._stopping():
            try:
                answer = await self.call(question())
            except LeaseLost:
                await self._join()
                continue
            except (ServiceUnavailable, DeadlineExceeded):
                if time.monotonic() - heard > ORPHAN_S:
                    _LOG.error("no coordinator for %g s: giving up", ORPHAN_S)
                    return
                await asyncio.sleep(_pause_s())
                continue
            heard = time.monotonic()
            yield answer

    async def _join(self) -> None:
        """Returns without having joined when it is stopping."""
        until = time.monotonic() + ORPHAN_S
        while True:
            try:
                self._joined(await self.call(self._hello()))
                return
            except (ServiceUnavailable, DeadlineExceeded):
                if self._stopping():
                    return
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_pause_s())

    async def close(self) -> None:
        await self._client.close()
