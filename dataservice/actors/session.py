"""Sessions: one start of the trainer each, in which all ranks read the same plan from one cursor.

Invariants: a state goes on exactly or is refused with both values and the remedy; a rank is no
further than the slowest of its peers; a step is forgotten once every rank is past it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from dataservice.actors.plan_messages import PlanInfo
from dataservice.actors.policies import check_policy, decoder_and_policy
from dataservice.actors.steps import ActiveStep
from dataservice.core.limits import MAX_STEP_PACKS
from dataservice.core.plan.check import check_step
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, DataServiceError, ResumeRefused
from dataservice.wire.messages import CursorState, OpenSession, ResumeState

STATE_VERSION = 2
MAX_PEERS = 4096
LARGEST_COUNT = 1 << 40
"""Steps, packs, windows and samples that no run reaches."""


def grid_of(request: OpenSession) -> Grid:
    for name in ("dp_size", "micro_steps", "packs_per_cell"):
        if getattr(request, name) < 1:
            raise ConfigError(f"{name} = {getattr(request, name)}: give a number of at least 1")
    if not 0 <= request.dp_rank < request.dp_size:
        raise ConfigError(
            f"dp_rank = {request.dp_rank} with dp_size = {request.dp_size}: "
            f"ranks are numbered 0 to {request.dp_size - 1}"
        )
    if not 0 <= request.peer < request.peers <= MAX_PEERS:
        raise ConfigError(
            f"peer = {request.peer} with peers = {request.peers}: the processes that read for a "
            f"rank are numbered from 0, and at most {MAX_PEERS}"
        )
    grid = Grid(
        dp_size=request.dp_size,
        micro_steps=request.micro_steps,
        packs_per_cell=request.packs_per_cell,
    )
    check_step(grid)
    return grid


def check_state(state: ResumeState, *, grid: Grid, job: str, plan: PlanInfo, built_by: str) -> None:
    """Raises ResumeRefused, with both values and the remedy, when `state` cannot go on exactly.

    A state of another plan goes on when the plans agree in its phase and it was saved between
    steps.
    """

    def refuse(what: str, saved: object, now: object, remedy: str) -> None:
        raise ResumeRefused(f"the saved state has {what} {saved}, this service {now}: {remedy}")

    if state.version != STATE_VERSION:
        refuse("version", state.version, STATE_VERSION, "resume with the version that saved it")
    if state.job != job:
        refuse("job", state.job, job, "connect to the service of that job")
    _check_values(state)
    cursor = state.cursor
    same_phase = plan.phase_digests[cursor.phase : cursor.phase + 1] == (cursor.phase_digest,)
    if state.plan_digest != plan.digest and not same_phase:
        refuse(
            "plan digest",
            state.plan_digest,
            plan.digest,
            "serve with the config, seed and data that it was saved with; "
            f"{_new_phase(state, plan)}; or start a new run without a state",
        )
    if state.plan_digest != plan.digest and state.micro_step:
        refuse(
            "plan digest",
            state.plan_digest,
            plan.digest,
            f"it was saved inside step {cursor.step} (micro-step {state.micro_step}), where a "
            "plan cannot be changed; use a state that was saved between steps",
        )
    _check_shape(state, plan)
    saved_decoder, saved_policy = decoder_and_policy(state.decoder)
    decoder, policy = decoder_and_policy(built_by)
    check_policy(saved=saved_policy, now=policy, what="the saved state")
    if saved_decoder != decoder:
        refuse(
            "decoder",
            saved_decoder,
            decoder,
            "install the same image libraries, because other builds may decode other pixels, "
            "or start a new run without a state",
        )
    saved = (state.dp_size, state.micro_steps, state.packs_per_cell)
    now = (grid.dp_size, grid.micro_steps, grid.packs_per_cell)
    if state.micro_step and saved != now:
        refuse(
            "(dp_size, micro_steps, packs_per_cell)",
            saved,
            now,
            f"it was saved inside step {state.cursor.step} (micro-step {state.micro_step}); "
            "use the same sizes, or a state that was saved between steps",
        )


def _damaged(what: str, saved: object, expected: str) -> ResumeRefused:
    return ResumeRefused(
        f"the saved state has {what} {saved}, should be {expected}: it is damaged or was changed; "
        "resume from another checkpoint, or start a new run without a state"
    )


def _check_values(state: ResumeState) -> None:
    """What no service can have saved, whatever its plan."""
    cursor = state.cursor
    sizes = {
        "dp_size": state.dp_size,
        "micro_steps": state.micro_steps,
        "packs_per_cell": state.packs_per_cell,
    }
    for name, size in sizes.items():
        if not 1 <= size <= MAX_STEP_PACKS:
            raise _damaged(name, size, f"from 1 to {MAX_STEP_PACKS}")
    if not 0 <= state.micro_step < state.micro_steps:
        raise _damaged("micro_step", state.micro_step, f"from 0 to {state.micro_steps - 1}")
    for lane, place in enumerate(cursor.lanes):
        if len(place) != 2:
            raise _damaged(f"lanes[{lane}]", list(place), "a window and an offset in it")
    counts = {
        "step": (cursor.step,),
        "phase": (cursor.phase,),
        "next_pack": cursor.next_pack,
        "lanes": tuple(number for place in cursor.lanes for number in place),
        "next_lane": cursor.next_lane,
    }
    for name, numbers in counts.items():
        for number in numbers:
            if not 0 <= number < LARGEST_COUNT:
                raise _damaged(name, number, f"from 0 to {LARGEST_COUNT - 1}")
    for home in cursor.lane_homes:
        if not -1 <= home < MAX_STEP_PACKS:
            raise _damaged("lane_homes", home, f"from -1 to {MAX_STEP_PACKS - 1}")
    per_node = cursor.ranks_per_node
    if per_node < 0 or (state.micro_step and per_node and state.dp_size % per_node):
        raise _damaged("ranks_per_node", per_node, f"0 or a divisor of dp_size {state.dp_size}")


def _check_shape(state: ResumeState, plan: PlanInfo) -> None:
    """Of a state of this plan, or of one that agrees with it in the state's phase."""
    cursor = state.cursor
    if plan.phase_digests[cursor.phase : cursor.phase + 1] != (cursor.phase_digest,):
        raise _damaged(
            "phase", f"{cursor.phase} of digest {cursor.phase_digest}", "one of the plan's"
        )
    streams = len(plan.stream_lanes)
    for name, found, expected in (
        ("next_pack", cursor.next_pack, streams),
        ("next_lane", cursor.next_lane, streams),
        ("lanes", cursor.lanes, plan.num_lanes),
        ("lane_homes", cursor.lane_homes, plan.num_lanes),
    ):
        if len(found) != expected:
            raise _damaged(f"{len(found)} values in", name, f"{expected}")
    for lane, num_lanes in zip(cursor.next_lane, plan.stream_lanes, strict=True):
        if lane >= num_lanes:
            raise _damaged("next_lane", lane, f"from 0 to {num_lanes - 1}")


def _new_phase(state: ResumeState, plan: PlanInfo) -> str:
    """How to go on from a state with other settings, in words."""
    cursor = state.cursor
    if sum(plan.stream_lanes) != len(cursor.lanes) or len(plan.stream_lanes) != len(
        cursor.next_pack
    ):
        return (
            f"for other settings from here on, begin with lanes as they were ({len(cursor.lanes)} "
            f"in all, this plan has {sum(plan.stream_lanes)})"
        )
    ends, lane = [], 0
    for count, firsts in zip(plan.stream_lanes, plan.phase_windows, strict=True):
        places = cursor.lanes[lane : lane + count]
        begun = max(window + (offset > 0) for window, offset in places)
        ends.append(begun - max(first for first in firsts if first <= begun))
        lane += count
    names = ("windows", "vision_windows")
    given = ", ".join(f"{name}: {end}" for name, end in zip(names, ends, strict=False))
    return (
        f"for other settings from here on, leave phase {cursor.phase} of the plan and its lanes "
        f"and window as they were, end it in plan.phases with `{given}` (with `packs: "
        f"{sum(cursor.next_pack)}` besides it is cut here at once) and put a phase with the new "
        "settings behind it"
    )


@dataclass(slots=True)
class PeerProgress:
    done: tuple[int, int]
    """Everything before this (step, micro-step) was yielded to the trainer."""
    heard: float
    """Monotonic time of the last call."""
    waited_s: float = 0.0
    closed: bool = False


class RankProgress:
    """Of the processes that read for a rank, which is no further than the slowest of them."""

    def __init__(self, *, done: tuple[int, int], heard: float, peers: int) -> None:
        self.peers = [PeerProgress(done=done, heard=heard) for _ in range(peers)]
        self.done = done
        """Of the slowest peer; kept, since every call of every peer asks it of all ranks."""

    def note(self, peer: int, done: tuple[int, int], waited_s: float, *, closing: bool) -> None:
        reader = self.peers[peer]
        reader.done = max(reader.done, done)
        reader.heard = time.monotonic()
        reader.waited_s += waited_s
        reader.closed = reader.closed or closing
        self.done = min(one.done for one in self.peers)

    @property
    def slowest_peer(self) -> int:
        return min(range(len(self.peers)), key=lambda number: self.peers[number].done)

    @property
    def heard(self) -> float:
        return self.peers[self.slowest_peer].heard

    @property
    def waited_s(self) -> float:
        """Of the peer that waited longest: the others wait with it."""
        return max(peer.waited_s for peer in self.peers)

    @property
    def closed(self) -> bool:
        return all(peer.closed for peer in self.peers)


class Session:
    def __init__(
        self,
        *,
        generation: int,
        run_id: str,
        grid: Grid,
        state: ResumeState | None,
        hosts: Mapping[int, tuple[str, ...]],
        first: tuple[int, int],
        cursor: CursorState,
    ) -> None:
        """`hosts`: by rank, of each peer; `first`: (step, micro-step) where the run began;
        `cursor`: of the first step that not every rank has been given, a later one when the
        coordinator was restarted."""
        self.generation = generation
        self.run_id = run_id
        self.grid = grid
        self.state = state
        self.hosts = dict(hosts)
        self.peers = len(self.hosts[0])
        """Processes that read for a rank."""
        self.first_step, self.first_micro_step = first
        self.next_cursor = cursor
        """Of the next step to plan."""
        self.end_step = -1
        self.steps: dict[int, ActiveStep] = {}
        now = time.monotonic()
        self.ranks = [
            RankProgress(done=max(first, (cursor.step, 0)), heard=now, peers=self.peers)
            for _ in range(self.grid.dp_size)
        ]
        self.failure: DataServiceError | None = None

    @property
    def next_step(self) -> int:
        return self.next_cursor.step

    @property
    def done_step(self) -> int:
        """Every rank has been given all steps before this one."""
        return min(rank.done[0] for rank in self.ranks)

    @property
    def held_step(self) -> int:
        """First step that is still kept: one more than needed, because of the peers of a rank
        (tensor, pipeline and context parallel) the slower ones may be a step behind."""
        return self.done_step - 1

    def host_peers(self, dp_rank: int, host: str) -> tuple[int, ...]:
        """Peers of a rank that came from `host`, rising."""
        return tuple(peer for peer, its in enumerate(self.hosts[dp_rank]) if its == host)

    def takers(self, dp_rank: int) -> int:
        """Hosts of a rank's peers: on each, one peer fetches a pack and hands it on."""
        return len(set(self.hosts[dp_rank]))

    def progress(
        self,
        dp_rank: int,
        peer: int,
        done: tuple[int, int],
        waited_s: float,
        *,
        closing: bool = False,
    ) -> bool:
        """Notes what a peer has done; True when the slowest rank moved on to another step."""
        if not 0 <= dp_rank < self.grid.dp_size:
            raise ConfigError(f"dp_rank = {dp_rank}: this session has {self.grid.dp_size} ranks")
        if not 0 <= peer < self.peers:
            raise ConfigError(f"peer = {peer}: ranks of this session have {self.peers} peers")
        before = self.done_step
        self.ranks[dp_rank].note(peer, done, waited_s, closing=closing)
        moved = self.done_step > before
        if moved:
            for step in [s for s in self.steps if s < self.held_step]:
                del self.steps[step]
        return moved

    def slowest(self) -> str:
        """Who holds the others back, in words."""
        rank = min(range(len(self.ranks)), key=lambda r: self.ranks[r].done)
        peer = self.ranks[rank].slowest_peer
        progress = self.ranks[rank].peers[peer]
        age = time.monotonic() - progress.heard
        state = "has closed its stream" if progress.closed else f"was last heard {age:.1f} s ago"
        who = f"rank {rank}" if self.peers == 1 else f"peer {peer} of rank {rank}"
        return f"{who} is at step {progress.done[0]} micro-step {progress.done[1]} and {state}"

    def is_done(self, step: int, micro_step: int, dp_rank: int) -> bool:
        return (step, micro_step) < self.ranks[dp_rank].done
