"""A coordinator against a small fake planner, and the calls that tests make of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.pack_specs import packed_spec, sample_mark
from dataservice.actors.plan_messages import (
    LaneNeeds,
    NeedsRequest,
    PlanInfo,
    PlannedStep,
    StepRequest,
)
from dataservice.actors.state_log import StateLog
from dataservice.config import Config
from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.errors import ServiceUnavailable
from dataservice.wire.messages import (
    Assignment,
    CursorState,
    GetAssignment,
    GetStatus,
    GetSteps,
    HolesDecided,
    OpenSession,
    PackFailed,
    PullWork,
    RegisterWorker,
    ReportHoles,
    StepCells,
    StepSettings,
    Work,
)

NUM_LANES = 2
DIGEST, PHASE = "d" * 64, "e" * 64


def cursor_at(step: int, next_pack: int, homes: tuple[int, ...] = (-1, -1)) -> CursorState:
    return CursorState(
        step=step,
        phase=0,
        phase_digest=PHASE,
        next_pack=(next_pack,),
        lanes=((step, 0), (step, 0)),
        next_lane=(0,),
        lane_homes=homes,
    )


START = cursor_at(0, 0)


def int64(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


class FakePlanner:
    """Packs "<step>.<number>", dealt in order; `breaks` requests fail as a dead process would."""

    def __init__(self) -> None:
        self.breaks = 0
        self.asked: list[StepRequest] = []

    async def open(self, _config: str) -> PlanInfo:
        return PlanInfo(
            digest=DIGEST,
            phase_digests=(PHASE,),
            phase_windows=((0,),),
            stream_lanes=(NUM_LANES,),
            pack_length=8,
            num_lanes=NUM_LANES,
            start=START,
            warnings=(),
            num_samples=100,
            vocab_size=262,
            pad_token=256,
            image_token=261,
        )

    async def step(self, request: StepRequest) -> PlannedStep:
        if self.breaks:
            self.breaks -= 1
            raise ServiceUnavailable("the planning process ended")
        self.asked.append(request)
        cursor = request.cursor
        count = request.dp_size * request.micro_steps
        settings = StepSettings(pack_length=8, num_packs=(1,) * request.micro_steps)
        ids = tuple(f"{cursor.step}.{i}" for i in range(count))
        marks = b"".join(sample_mark(sample_of(pack_id)).to_bytes(4, "little") for pack_id in ids)
        return PlannedStep(
            end=False,
            next_cursor=cursor_at(cursor.step + 1, cursor.next_pack[0] + count, cursor.lane_homes),
            settings=settings,
            next_step=settings,
            number=int64([cursor.next_pack[0] + i for i in range(count)]),
            pack_ids=ids,
            specs=tuple(packed_spec(_spec(pack_id)) for pack_id in ids),
            sample_marks=marks,
            sample_counts=int64([1] * count),
            lane=int64([i % NUM_LANES for i in range(count)]),
            micro_step=int64([i // request.dp_size for i in range(count)]),
            dp_rank=int64([i % request.dp_size for i in range(count)]),
            tokens=int64([8] * count),
            num_images=int64([0] * count),
            num_patches=int64([0] * count),
            cost=int64([1] * count),
            num_samples=count,
            loss_tokens=7,
        )

    async def needs(self, _request: NeedsRequest) -> LaneNeeds:
        return LaneNeeds(lanes=((),) * NUM_LANES)

    async def close(self) -> None: ...


def sample_of(pack_id: str) -> str:
    """Key of the one sample of a pack; its picture is `a.jpg` in `src/a.zip`."""
    return f"src/a.jsonl@{pack_id.replace('.', '0')}"


def _spec(pack_id: str) -> PackSpec:
    shards = tuple(
        ShardRef(source="src", name=name, url=f"/{name}", size_bytes=9, mtime_ns=1)
        for name in ("a.jsonl", "a.zip")
    )
    image = ImageSpec(
        shard=1,
        member="a.jpg",
        offset=0,
        stored_bytes=9,
        size_bytes=9,
        method=0,
        crc32=0,
        width=28,
        height=28,
        target_width=28,
        target_height=28,
    )
    item = ItemSpec(
        key=sample_of(pack_id),
        source="src",
        layout="llava",
        shard=0,
        offset=0,
        length=9,
        crc32=0,
        start=0,
        stop=8,
        total_tokens=8,
        images=(image,),
        kept_images=1,
    )
    return PackSpec(
        pack_id=pack_id, pack_length=8, shards=shards, items=(item,), num_tokens=8, num_patches=4
    )


class Bench:
    """A coordinator and the calls that tests make of it."""

    def __init__(self, coordinator: Coordinator, planner: FakePlanner) -> None:
        self.coordinator = coordinator
        self.planner = planner
        self.leases: dict[str, int] = {}

    async def worker(self, worker_id: str, node: str = "n0", decoder: str = "pil") -> None:
        seat = await self.coordinator.register_worker(
            RegisterWorker(
                worker_id=worker_id, node=node, endpoint=f"{worker_id}:1", decoder=decoder
            )
        )
        self.leases[worker_id] = seat.lease

    async def status(self) -> dict[str, Any]:
        report = await self.coordinator.get_status(GetStatus())
        status: dict[str, Any] = json.loads(report.status)
        return status

    async def open(
        self, run_id: str, rank: int = 0, ranks: int = 1, *, wait_s: float = 0.0, **more: Any
    ) -> Any:
        return await self.coordinator.open_session(
            OpenSession(
                job="test",
                run_id=run_id,
                dp_rank=rank,
                dp_size=ranks,
                micro_steps=more.get("micro_steps", 1),
                packs_per_cell=1,
                state=more.get("state"),
                host=more.get("host", "h"),
                wait_s=wait_s,
                peer=more.get("peer", 0),
                peers=more.get("peers", 1),
                pid=more.get("pid", 1),
            )
        )

    async def begun(self, run_id: str = "run") -> int:
        """The session of a run with worker w0 whose first step is given out."""
        await self.worker("w0")
        session: int = (await self.open(run_id)).session
        await self.one(session, 0, done=0)
        return session

    async def steps(
        self, session: int, first: int, done: int, rank: int = 0, *, peer: int = 0
    ) -> Any:
        return await self.coordinator.get_steps(
            GetSteps(
                session=session,
                dp_rank=rank,
                first_step=first,
                count=1,
                done_step=done,
                done_micro_step=0,
                wait_s=1.0,
                peer=peer,
            )
        )

    async def one(self, session: int, step: int, done: int) -> StepCells:
        found = await self.steps(session, step, done)
        (cells,) = found.steps
        return cells

    async def pull(
        self,
        worker_id: str,
        session: int,
        after: int = 0,
        *,
        retiring: str = "",
        reach: Iterable[str] = (),
        **figures: Any,
    ) -> Work:
        counters = dict.fromkeys(
            ("ready_bytes", "ready_packs", "queued_packs", "built_packs", "served_packs"), 0
        )
        counters |= dict.fromkeys(("read_origin_bytes", "read_staged_bytes"), 0)
        return await self.coordinator.pull_work(
            PullWork(
                worker_id=worker_id,
                lease=self.leases[worker_id],
                session=session,
                after_sequence=after,
                wait_s=0.1,
                served_bytes=0,
                decode_s=0.0,
                images=0,
                retiring=retiring,
                reach=tuple(reach),
                **(counters | figures),
            )
        )

    async def ask(
        self, worker_id: str, session: int, pack_id: str, *, begins: bool = False
    ) -> Assignment:
        return await self.coordinator.get_assignment(
            GetAssignment(
                worker_id=worker_id,
                lease=self.leases[worker_id],
                session=session,
                pack_id=pack_id,
                begins=begins,
            )
        )

    async def lose(self, worker_id: str) -> None:
        """Its lease ends."""
        self.coordinator.shared.registry.workers[worker_id].heard -= 1000
        self.coordinator.work.expire()

    async def hole(
        self, worker_id: str, pack_id: str, number: int | str = 0, reason: str = "truncated JPEG"
    ) -> HolesDecided:
        """Of picture `number` of the pack's sample."""
        return await self.coordinator.report_holes(
            ReportHoles(
                worker_id=worker_id,
                lease=self.leases[worker_id],
                pack_id=pack_id,
                holes={f"{sample_of(pack_id)}#{number}": reason},
            )
        )

    async def fail(self, worker_id: str, session: int, pack_id: str, *, fatal: bool) -> None:
        await self.coordinator.report_pack_failed(
            PackFailed(
                worker_id=worker_id,
                lease=self.leases[worker_id],
                session=session,
                pack_id=pack_id,
                reason="StorageError: connection refused",
                fatal=fatal,
            )
        )


def on_bench(config: Config, state: Path, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        planner = FakePlanner()
        state.mkdir(exist_ok=True)
        coordinator = Coordinator(config, planner, StateLog(str(state / "journal")))
        await coordinator.start()
        try:
            await test(Bench(coordinator, planner))
        finally:
            await coordinator.stop()

    asyncio.run(asyncio.wait_for(run(), 30))
