"""The coordinator's end of the pipe to its planning process.

Invariants: requests are answered one at a time in the order asked; a planning process that ends or
stays silent past the deadline is an error that says so, and the next request starts a new one; a
silent one prints its stacks before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import replace
from typing import Protocol, TypeVar

from dataservice import errors
from dataservice.actors.plan_messages import (
    AheadRequest,
    BlocksKept,
    CountHere,
    KeepBlocks,
    LaneNeeds,
    MissingBlocks,
    NeedsRequest,
    PlanInfo,
    PlannedStep,
    PlanReply,
    PlanRequest,
    StepPart,
    StepRequest,
)
from dataservice.actors.planner import MAX_MESSAGE_BYTES, PREFIX_BYTES, frame, frame_length
from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    StaleIndexError,
)
from dataservice.wire.counting import CountBlock, CountedBlock, Roots
from dataservice.wire.schema import decode, encode

READ_AHEAD_BYTES = 2 << 20
"""Of the pipe."""
ABORT_S = 2.0
"""For a planning process to print its stacks."""
Message = TypeVar("Message")


class BlocksMissing(Exception):
    """A lazy index lacks blocks for the answer; asked again once they are kept, it is given."""

    def __init__(self, blocks: tuple[CountBlock, ...]) -> None:
        super().__init__(f"{len(blocks)} blocks are not counted yet")
        self.blocks = blocks


class PlannerLink(Protocol):
    """What the coordinator needs of a planner; tests give one that answers in place."""

    async def open(self, config: str) -> PlanInfo: ...

    async def step(self, request: StepRequest) -> PlannedStep: ...

    async def needs(self, request: NeedsRequest) -> LaneNeeds: ...

    async def close(self) -> None: ...


class LazyPlannerLink(PlannerLink, Protocol):
    """With a lazy index; `step` and `needs` may raise BlocksMissing."""

    async def ahead(self, request: AheadRequest) -> MissingBlocks: ...

    async def keep(self, blocks: tuple[CountedBlock, ...]) -> BlocksKept: ...

    async def count(self, keys: tuple[tuple[int, ...], ...]) -> BlocksKept: ...

    async def roots(self, source: str) -> Roots: ...


class PlannerProcess:
    """Runs `python -m dataservice.actors.planner` and talks to it."""

    def __init__(self, *, deadline_s: float = 300.0) -> None:
        self._deadline_s = deadline_s
        self._config = ""
        self._digest = ""
        self._closed = False
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def open(self, config: str) -> PlanInfo:
        self._config = config
        reply = await self._ask(PlanRequest(config=config))
        assert reply.info is not None
        self._digest = reply.info.digest
        return reply.info

    async def step(self, request: StepRequest) -> PlannedStep:
        reply = await self._ask(PlanRequest(step=request))
        assert reply.step is not None
        return reply.step

    async def needs(self, request: NeedsRequest) -> LaneNeeds:
        reply = await self._ask(PlanRequest(needs=request))
        assert reply.needs is not None
        return reply.needs

    async def ahead(self, request: AheadRequest) -> MissingBlocks:
        reply = await self._ask(PlanRequest(ahead=request))
        assert reply.ahead is not None
        return reply.ahead

    async def keep(self, blocks: tuple[CountedBlock, ...]) -> BlocksKept:
        return await self._kept(PlanRequest(keep=KeepBlocks(blocks=blocks)))

    async def count(self, keys: tuple[tuple[int, ...], ...]) -> BlocksKept:
        return await self._kept(PlanRequest(count=CountHere(keys=keys)))

    async def roots(self, source: str) -> Roots:
        reply = await self._ask(PlanRequest(roots=source))
        assert reply.roots is not None
        return reply.roots

    async def _kept(self, request: PlanRequest) -> BlocksKept:
        reply = await self._ask(request)
        assert reply.kept is not None
        return reply.kept

    async def _ask(self, request: PlanRequest) -> PlanReply:
        # shielded: a caller that is cancelled must not leave half an answer in the pipe
        turn = asyncio.ensure_future(self._in_turn(request))
        turn.add_done_callback(lambda done: done.cancelled() or done.exception())
        reply = await asyncio.shield(turn)
        if reply.failed is not None:
            kind = getattr(errors, reply.failed.kind, DataServiceError)
            raise kind(reply.failed.reason)
        if reply.missing is not None:
            raise BlocksMissing(reply.missing.blocks)
        return reply

    async def _in_turn(self, request: PlanRequest) -> PlanReply:
        async with self._turn:
            if self._closed:
                raise DataServiceError("the planning process was closed")
            if self._process is None or self._process.returncode is not None:
                self._process = await self._started()
                if request.config is None:
                    await self._reopen(self._process)
            return await self._exchange(self._process, request)

    async def _reopen(self, process: asyncio.subprocess.Process) -> None:
        """The process before ended: the new one must have the same plan."""
        reply = await self._exchange(process, PlanRequest(config=self._config))
        digest = reply.info.digest if reply.info is not None else ""
        if digest != self._digest:
            process.kill()
            why = reply.failed.reason if reply.failed is not None else f"its digest is {digest}"
            raise StaleIndexError(
                f"the index changed while the service ran: the plan had digest {self._digest}, "
                f"and now {why}; restart the service"
            )

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-X",
            "faulthandler",  # SIGABRT prints all stacks
            "-m",
            "dataservice.actors.planner",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=READ_AHEAD_BYTES,
        )

    async def _exchange(
        self, process: asyncio.subprocess.Process, request: PlanRequest
    ) -> PlanReply:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                process.stdin.write(frame(encode(request, max_bytes=MAX_MESSAGE_BYTES)))
                await process.stdin.drain()
                reply = await _message(PlanReply, process.stdout)
                return reply if reply.step is None else await _whole(reply, process.stdout)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.wait()
            raise ServiceUnavailable(
                f"the planning process ended with code {code}; its log says why"
            ) from error
        except TimeoutError as error:
            await _abort(process)
            raise DeadlineExceeded(
                f"the coordinator waited {self._deadline_s:g} s for the planning process, whose "
                "stacks are in the log"
            ) from error

    async def close(self) -> None:
        self._closed = True
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


async def _message(kind: type[Message], pipe: asyncio.StreamReader) -> Message:
    prefix = await pipe.readexactly(PREFIX_BYTES)
    payload = await pipe.readexactly(frame_length(prefix))
    return decode(kind, payload, max_bytes=MAX_MESSAGE_BYTES)


async def _whole(reply: PlanReply, pipe: asyncio.StreamReader) -> PlanReply:
    """With the parts of its step, between which the event loop does other work."""
    assert reply.step is not None
    pack_ids: list[str] = []
    specs: list[bytes] = []
    for number in range(reply.parts):
        if number:
            await asyncio.sleep(0)
        part = await _message(StepPart, pipe)
        pack_ids += part.pack_ids
        specs += part.specs
    return replace(reply, step=replace(reply.step, pack_ids=tuple(pack_ids), specs=tuple(specs)))


async def _abort(process: asyncio.subprocess.Process) -> None:
    """It prints its stacks, if it still can, and ends."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGABRT)
    try:
        async with asyncio.timeout(ABORT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
