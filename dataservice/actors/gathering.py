"""The ranks of a new run, and the peers of each, while they arrive.

Invariants: all present the same sizes, state and number of peers, or all are refused with what
differs; a place is taken by one living process.
"""

from __future__ import annotations

import time

from dataservice.actors.session import grid_of
from dataservice.errors import ConfigError, DataServiceError, ResumeRefused
from dataservice.wire.messages import OpenSession, ResumeState

OWN_LAYOUT = "give every process of the job the layout with its own rank"


class Gathering:
    def __init__(self, first: OpenSession) -> None:
        self.run_id = first.run_id
        self.grid = grid_of(first)
        self.peers = first.peers
        self.state = first.state
        self.refused: DataServiceError | None = None
        self._hosts: dict[tuple[int, int], str] = {}
        """Host by (rank, peer)."""
        self._heard: dict[tuple[int, int], float] = {}
        self._processes: dict[tuple[int, int], list[tuple[str, int]]] = {}
        """(host, pid) of those that came to a place, the newest last."""

    def join(self, request: OpenSession) -> None:
        """Raises what all ranks of the run are refused with."""
        if self.refused is None:
            self._check_same(request)
        if self.refused is None:
            self._check_alone(request)
        if self.refused is not None:
            raise self.refused
        place = (request.dp_rank, request.peer)
        self._hosts[place] = request.host
        self._heard[place] = time.monotonic()

    @property
    def hosts(self) -> dict[int, tuple[str, ...]]:
        """By rank, the host of each of its peers, once all have come."""
        return {
            rank: tuple(self._hosts[rank, peer] for peer in range(self.peers))
            for rank in range(self.grid.dp_size)
        }

    def _check_same(self, request: OpenSession) -> None:
        grid = grid_of(request)
        if (grid, request.peers) != (self.grid, self.peers):
            self.refused = ConfigError(
                f"rank {request.dp_rank} of run {self.run_id} asks for {grid} and "
                f"{request.peers} peers a rank, other ranks for {self.grid} and {self.peers}: give "
                "every rank the same sizes"
            )
        elif request.state != self.state:
            self.refused = ResumeRefused(
                f"rank {request.dp_rank} of run {self.run_id} presents {_where(request.state)}, "
                f"other ranks {_where(self.state)}: load the same checkpoint on every rank"
            )

    def _check_alone(self, request: OpenSession) -> None:
        """One that asks again after another has come to its place shows that both are alive.

        Where ranks have no peers it is no error: processes may share a rank without saying so.
        """
        came = self._processes.setdefault((request.dp_rank, request.peer), [])
        process = (request.host, request.pid)
        if process not in came:
            came.append(process)
        elif process != came[-1] and self.peers > 1:
            self.refused = ConfigError(
                f"{_both(process, came[-1])} say that they are peer {request.peer} of rank "
                f"{request.dp_rank}: {OWN_LAYOUT}"
            )

    def complete(self, patience_s: float) -> bool:
        """Whether nobody is missing; quick, for all ask it as they come."""
        return (
            len(self._heard) == self.grid.dp_size * self.peers
            and min(self._heard.values()) > time.monotonic() - patience_s
        )

    def missing(self, patience_s: float) -> tuple[int, ...]:
        """Ranks of which some peer has not come, or came and has not asked again for
        `patience_s`."""
        return tuple(dict.fromkeys(rank for rank, _ in self._missing(patience_s)))

    def in_words(self, patience_s: float) -> str:
        """Which peers are missing; or who shares a rank while others are missing."""
        missing = self._missing(patience_s)
        if self.peers > 1:
            by_rank: dict[int, list[str]] = {}
            for rank, peer in missing:
                by_rank.setdefault(rank, []).append(str(peer))
            return "; ".join(
                f"of rank {rank} peer{'s' * (len(peers) > 1)} {', '.join(peers)}"
                for rank, peers in by_rank.items()
            )
        shared = [place for place, came in self._processes.items() if len(came) > 1]
        if not missing or not shared:
            return ""
        rank, peer = shared[0]
        return f"{_both(*self._processes[rank, peer][-2:])} came as rank {rank}: {OWN_LAYOUT}"

    def _missing(self, patience_s: float) -> list[tuple[int, int]]:
        limit = time.monotonic() - patience_s
        return [
            (rank, peer)
            for rank in range(self.grid.dp_size)
            for peer in range(self.peers)
            if self._heard.get((rank, peer), limit) <= limit
        ]


def _both(one: tuple[str, int], other: tuple[str, int]) -> str:
    return f"processes {one[1]} on {one[0]} and {other[1]} on {other[0]} both"


def _where(state: ResumeState | None) -> str:
    if state is None:
        return "no state"
    return f"a state of step {state.cursor.step} micro-step {state.micro_step}"
