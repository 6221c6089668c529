"""The planning process: owns the index and the plan, answers over its standard input and output.

Invariants: one request is answered at a time, in order; the process ends when its input ends, so
it never outlives the coordinator; nothing but replies is written to standard output.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import time
import traceback
from dataclasses import replace
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dataservice.actors.excluding import check_excluded_samples
from dataservice.actors.lazy_planning import LazyPlanning
from dataservice.actors.plan_messages import (
    LaneNeeds,
    NeedsRequest,
    PlanFailed,
    PlanInfo,
    PlannedStep,
    PlanReply,
    PlanRequest,
    StepPart,
    StepRequest,
)
from dataservice.actors.quiet_gc import keep_gc_quiet
from dataservice.actors.shard_needs import ShardNeeds
from dataservice.actors.spec_makers import SpecMakers
from dataservice.actors.step_specs import specs_of_step
from dataservice.config import Config, config_from_json
from dataservice.core.balance import assign
from dataservice.core.cursor import Cursor
from dataservice.core.plan import Plan
from dataservice.core.plan.run_plan import RunPlan
from dataservice.core.settings import Grid
from dataservice.core.tables import StepPlan
from dataservice.errors import DataServiceError
from dataservice.obs.logs import Logs
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.index import Index
from dataservice.storage.lazy import BlocksMissing, check_lazy_plan
from dataservice.storage.staging import budget_warnings
from dataservice.wire.messages import CursorState, StepSettings
from dataservice.wire.schema import decode, encode

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = (4 << 30) - 1
"""Of the pipe."""
PART_PACKS = 512
"""Of a step, in one message."""
MADE_AT_ONCE = 100_000
"""Objects, of the specs of a window; they do not stay."""


def cursor_state(
    plan: Plan,
    cursor: Cursor,
    lane_homes: tuple[int, ...],
    ranks_per_node: int = 0,
    excluded: str = "",
) -> CursorState:
    return CursorState(
        step=cursor.step,
        phase=cursor.phase,
        phase_digest=plan.phase_digests[cursor.phase],
        next_pack=cursor.next_pack,
        lanes=cursor.lanes,
        next_lane=cursor.next_lane,
        lane_homes=lane_homes,
        ranks_per_node=ranks_per_node,
        excluded=excluded,
    )


def cursor_of(state: CursorState) -> Cursor:
    return Cursor(
        step=state.step,
        phase=state.phase,
        next_pack=state.next_pack,
        lanes=tuple((window, offset) for window, offset in state.lanes),
        next_lane=state.next_lane,
    )


def _int64(values: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


class Planner:
    """Answers plan requests from an index on this machine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.renderer = TextRenderer.build(config.text)
        self.lazy: LazyPlanning | None = None
        if config.index == "lazy":
            check_lazy_plan(config.plan)
            self.lazy = LazyPlanning(config, self.renderer)
        self.index = Index.open(config.index_dir) if self.lazy is None else self.lazy.index
        check_excluded_samples(config.exclude, self.index)
        self.plan = Plan(config.plan, self.index)
        self.spec_makers = SpecMakers(
            self.index, config.plan.vision, helpers=None if self.lazy is None else 0
        )
        self.shard_needs = ShardNeeds(self.plan, self.index)
        # load compiled code before anybody waits for a step
        if self.plan.windows_in(0) != 0 and not (
            self.lazy is not None and self.lazy.missing(self.plan, 0, 0)
        ):
            self.plan.window(0, 0)
        if self.lazy is not None:
            self.lazy.opened()
        assign([0, 1], [0, 1], dp_size=2, micro_steps=1)

    def close(self) -> None:
        self.spec_makers.close()
        if self.lazy is not None:
            self.lazy.close()

    def info(self) -> PlanInfo:
        homes = (-1,) * self.plan.num_lanes
        staging = self.config.staging
        budget = staging.budget_bytes if staging.cache_dir is not None else None
        return PlanInfo(
            digest=self.plan.digest,
            phase_digests=self.plan.phase_digests,
            phase_windows=tuple(
                tuple(phase.first_window for phase in stream.phases) for stream in self.plan.streams
            ),
            stream_lanes=tuple(stream.num_lanes for stream in self.plan.streams),
            pack_length=max(phase.pack_length for phase in self.plan.streams[0].phases),
            num_lanes=self.plan.num_lanes,
            start=cursor_state(self.plan, self.plan.start(), homes),
            warnings=(*self.plan.warnings, *budget_warnings(self.index.manifest, budget)),
            num_samples=sum(sum(s.shard_samples) for s in self.index.sources),
            vocab_size=self.renderer.vocab_size,
            pad_token=self.renderer.pad_token,
            image_token=self.renderer.image_token,
            counted=None if self.lazy is None else self.lazy.counted,
        )

    def step(self, request: StepRequest) -> PlannedStep:
        started = time.monotonic()
        grid = Grid(
            dp_size=request.dp_size,
            micro_steps=request.micro_steps,
            packs_per_cell=request.packs_per_cell,
        )
        exclude = self.config.exclude
        start = RunPlan(plan=self.plan, grid=grid, exclude=exclude).start_of(
            cursor_of(request.cursor)
        )
        if self.lazy is not None:
            self.lazy.check_step(self.plan, start, grid)
        homes, per_node = request.cursor.lane_homes, request.cursor.ranks_per_node
        step = self.plan.step(start, grid, homes, ranks_per_node=max(1, per_node))
        if step is None:
            return PlannedStep(end=True, next_cursor=request.cursor)
        then = self._phase_behind(step, grid)
        specs = specs_of_step(self.plan, self.spec_makers, step, exclude.samples_at(step.step))
        marks, counts = specs.mark_arrays()
        return PlannedStep(
            end=False,
            next_cursor=cursor_state(
                self.plan, step.next_cursor, homes, per_node, exclude.in_force(step.step)
            ),
            settings=self.settings(step.phase, grid),
            next_step=None if then is None else self.settings(then, grid),
            pack_ids=tuple(step.pack_id(i) for i in range(step.num_packs)),
            specs=tuple(specs.packed),
            sample_marks=marks,
            sample_counts=counts,
            number=_int64(step.pack_number),
            lane=_int64(step.lane),
            micro_step=_int64(step.micro_step),
            dp_rank=_int64(step.dp_rank),
            tokens=_int64(step.tokens),
            num_images=_int64(step.num_images),
            num_patches=_int64(step.num_patches),
            cost=_int64(step.cost),
            num_samples=specs.num_samples,
            counts=self.plan.counts_in(step),
            excluded=specs.excluded,
            steps_skipped=exclude.skipped_at(step.step),
            samples_excluded=specs.num_excluded,
            loss_tokens=step.total_loss_tokens,
            lockstep_cost=step.lockstep_cost,
            lockstep_bound=step.lockstep_bound,
            lockstep_arrival=step.lockstep_arrival,
            moved=step.moved,
            moved_bytes=step.moved_bytes,
            plan_s=time.monotonic() - started,
        )

    def _phase_behind(self, step: StepPlan, grid: Grid) -> int | None:
        """Of the step that follows; None at the end."""
        if len(self.plan.phase_digests) == 1 and self.plan.windows_in(0) is None:
            return step.phase
        run = RunPlan(plan=self.plan, grid=grid, exclude=self.config.exclude)
        start = run.start_of(step.next_cursor)
        if self.lazy is not None:
            self.lazy.check_step(self.plan, start, grid)
        return self.plan.phase_of_step(start, grid)

    def settings(self, phase: int, grid: Grid) -> StepSettings:
        """Of the steps of a phase."""
        mix, tiles = self.plan.streams[0].phases[phase], self.config.plan.vision.mode == "tiles"
        return StepSettings(
            pack_length=mix.pack_length,
            num_packs=self.plan.packs_per_cell(grid),
            max_pixels=0 if tiles else mix.rules.max_pixels,
            max_tiles=mix.rules.max_tiles if tiles else 0,
        )

    def needs(self, request: NeedsRequest) -> LaneNeeds:
        if self.lazy is not None and not request.counted_only:
            self.lazy.check_needs(self.plan, cursor_of(request.cursor), request.windows_ahead)
        windows = [window for window, _ in request.cursor.lanes]
        return LaneNeeds(
            lanes=self.shard_needs.of_lanes(
                windows, request.windows_ahead, counted_only=request.counted_only
            )
        )


def answer(planner: Planner | None, request: PlanRequest) -> tuple[Planner | None, list[bytes]]:
    """The encoded reply to one request, and the parts of a step; errors become a PlanFailed."""
    try:
        if request.config is not None:
            if planner is not None:
                planner.close()
            planner = Planner(config_from_json(request.config))
            return planner, _encoded(PlanReply(info=planner.info()))
        if planner is None:
            raise DataServiceError("the planning process was asked before it was given a config")
        if request.step is not None:
            return planner, _in_parts(planner.step(request.step))
        if request.needs is not None:
            return planner, _encoded(PlanReply(needs=planner.needs(request.needs)))
        if planner.lazy is None:
            raise DataServiceError("empty plan request, or one for index: lazy")
        return planner, _encoded(_lazy_answer(planner.plan, planner.lazy, request))
    except BlocksMissing as missing:
        assert planner is not None and planner.lazy is not None
        return planner, _encoded(PlanReply(missing=planner.lazy.jobs(missing.keys)))
    except Exception as error:
        if not isinstance(error, DataServiceError | OSError):
            traceback.print_exc()
        failed = PlanFailed(kind=type(error).__name__, reason=str(error) or repr(error))
        return planner, _encoded(PlanReply(failed=failed))


def _lazy_answer(plan: Plan, lazy: LazyPlanning, request: PlanRequest) -> PlanReply:
    if request.ahead is not None:
        return PlanReply(ahead=lazy.ahead(plan, cursor_of(request.ahead.cursor), request.ahead))
    if request.keep is not None:
        return PlanReply(kept=lazy.keep(request.keep.blocks))
    if request.count is not None:
        return PlanReply(kept=lazy.count(request.count.keys))
    if request.roots is not None:
        return PlanReply(roots=lazy.roots(request.roots))
    raise DataServiceError("empty plan request")


def _encoded(reply: PlanReply) -> list[bytes]:
    return [encode(reply, max_bytes=MAX_MESSAGE_BYTES)]


def _in_parts(step: PlannedStep) -> list[bytes]:
    """The step without what is long, and that in parts that are read in a millisecond each."""
    firsts = range(0, len(step.pack_ids), PART_PACKS)
    parts = [
        StepPart(
            pack_ids=step.pack_ids[first : first + PART_PACKS],
            specs=step.specs[first : first + PART_PACKS],
        )
        for first in firsts
    ]
    head = replace(step, pack_ids=(), specs=())
    return _encoded(PlanReply(step=head, parts=len(parts))) + [
        encode(part, max_bytes=MAX_MESSAGE_BYTES) for part in parts
    ]


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def frame_length(prefix: bytes) -> int:
    length = int(_LENGTH.unpack(prefix)[0])
    if length > MAX_MESSAGE_BYTES:
        raise DataServiceError(f"plan message of {length} bytes is over {MAX_MESSAGE_BYTES}")
    return length


PREFIX_BYTES = _LENGTH.size


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    planner: Planner | None = None
    while len(prefix := source.read(PREFIX_BYTES)) == PREFIX_BYTES:
        payload = source.read(frame_length(prefix))
        request = decode(PlanRequest, payload, max_bytes=MAX_MESSAGE_BYTES)
        planner, replies = answer(planner, request)
        for reply in replies:
            sink.write(frame(reply))
        sink.flush()
        if request.config is not None:
            keep_gc_quiet(MADE_AT_ONCE)
    if planner is not None:
        planner.close()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may be aborted, to say where it stands
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")  # which helpers do not inherit
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    Logs.from_environment().install(role="planner")
    try:
        serve(sys.stdin.buffer, replies)
    except BrokenPipeError:
        # the coordinator was killed; the end of the process must not try to write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), replies.fileno())


if __name__ == "__main__":
    main()
