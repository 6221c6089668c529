"""The coordinator's end of the pipe to its planning process.

Invariants: requests are answered one at a time in the order asked; a planning process that ends or
stays silent past the deadline is an error that says so, never a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Protocol

from dataservice import errors
from dataservice.actors.plan_messages import (
    LaneNeeds,
    NeedsRequest,
    PlanInfo,
    PlannedStep,
    PlanReply,
    PlanRequest,
    SeekRequest,
    StepRequest,
)
from dataservice.actors.planner import PREFIX_BYTES, frame, frame_length
from dataservice.errors import DataServiceError, DeadlineExceeded
from dataservice.wire.messages import CursorState
from dataservice.wire.schema import decode, encode


class PlannerLink(Protocol):
    """What the coordinator needs of a planner; tests give one that answers in place."""

    async def open(self, config: str) -> PlanInfo: ...

    async def step(self, request: StepRequest) -> PlannedStep: ...

    async def seek(self, request: SeekRequest) -> CursorState: ...

    async def needs(self, request: NeedsRequest) -> LaneNeeds: ...

    async def close(self) -> None: ...


class PlannerProcess:
    """Runs `python -m dataservice.actors.planner` and talks to it."""

    def __init__(self, *, deadline_s: float = 300.0) -> None:
        self._deadline_s = deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def open(self, config: str) -> PlanInfo:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dataservice.actors.planner",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        reply = await self._ask(PlanRequest(config=config))
        assert reply.info is not None
        return reply.info

    async def step(self, request: StepRequest) -> PlannedStep:
        reply = await self._ask(PlanRequest(step=request))
        assert reply.step is not None
        return reply.step

    async def seek(self, request: SeekRequest) -> CursorState:
        reply = await self._ask(PlanRequest(seek=request))
        assert reply.cursor is not None
        return reply.cursor

    async def needs(self, request: NeedsRequest) -> LaneNeeds:
        reply = await self._ask(PlanRequest(needs=request))
        assert reply.needs is not None
        return reply.needs

    async def _ask(self, request: PlanRequest) -> PlanReply:
        # shielded: a caller that is cancelled must not leave half an answer in the pipe
        payload = await asyncio.shield(asyncio.ensure_future(self._exchange(encode(request))))
        reply = decode(PlanReply, payload)
        if reply.failed is not None:
            kind = getattr(errors, reply.failed.kind, DataServiceError)
            raise kind(reply.failed.reason)
        return reply

    async def _exchange(self, request: bytes) -> bytes:
        async with self._turn:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise DataServiceError("the planning process is not running")
            try:
                async with asyncio.timeout(self._deadline_s):
                    process.stdin.write(frame(request))
                    await process.stdin.drain()
                    prefix = await process.stdout.readexactly(PREFIX_BYTES)
                    return await process.stdout.readexactly(frame_length(prefix))
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                code = await process.wait()
                raise DataServiceError(
                    f"the planning process ended with code {code}; its log says why"
                ) from error
            except TimeoutError as error:
                process.kill()
                raise DeadlineExceeded(
                    f"the coordinator waited {self._deadline_s:g} s for the planning process"
                ) from error

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(2.0):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
