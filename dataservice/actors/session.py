"""Sessions: one start of the trainer each, in which all ranks read the same plan from one cursor.

Invariants: a rank is no further than the slowest of its peers; a step is forgotten once every rank
is past it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dataservice.actors.steps import ActiveStep
from dataservice.core.plan.check import check_step
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, DataServiceError
from dataservice.wire.messages import CursorState, OpenSession, ResumeState

MAX_PEERS = 4096


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
        self.given = done[0]
        """It knows where all packs of the steps before this one are, as far as is known."""

    def note(self, peer: int, done: tuple[int, int], waited_s: float, *, closing: bool) -> None:
        reader = self.peers[peer]
        reader.done = max(reader.done, done)
        reader.heard = time.monotonic()
        reader.waited_s += waited_s
        reader.closed = reader.closed or closing
        self.done = min(one.done for one in self.peers)

    @property
    def slowest_peer(self) -> int:
        places = [(one.done, one.heard) for one in self.peers]
        return places.index(min(places))

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
        self._ranks_at = Counter({self.ranks[0].done[0]: self.grid.dp_size})
        """Step -> ranks that are in it, so that a call of one rank looks at no other."""
        self.done_step = self.ranks[0].done[0]
        """Every rank has been given all steps before this one."""
        self.failure: DataServiceError | None = None

    @property
    def next_step(self) -> int:
        return self.next_cursor.step

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
        rank, before = self.ranks[dp_rank], self.done_step
        was = rank.done[0]
        rank.note(peer, done, waited_s, closing=closing)
        if rank.done[0] > was:
            self._ranks_at[rank.done[0]] += 1
            self._ranks_at[was] -= 1
            if not self._ranks_at[was]:
                del self._ranks_at[was]
                self.done_step = min(self._ranks_at)
        moved = self.done_step > before
        if moved:
            for step in [s for s in self.steps if s < self.held_step]:
                del self.steps[step]
        return moved

    def slowest(self) -> str:
        """Who holds the others back, in words; of several, who was not heard for longest."""
        places = [(one.done, one.heard) for one in self.ranks]
        rank = places.index(min(places))
        peer = self.ranks[rank].slowest_peer
        progress = self.ranks[rank].peers[peer]
        age = time.monotonic() - progress.heard
        state = "has closed its stream" if progress.closed else f"was last heard {age:.1f} s ago"
        who = f"rank {rank}" if self.peers == 1 else f"peer {peer} of rank {rank}"
        return f"{who} is at step {progress.done[0]} micro-step {progress.done[1]} and {state}"

    def is_done(self, step: int, micro_step: int, dp_rank: int) -> bool:
        return (step, micro_step) < self.ranks[dp_rank].done
