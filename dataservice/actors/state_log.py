"""What must outlive the coordinator: holes, the session, placements; kept in one journal file.

Invariants: a record is on disk before the method that wrote it returns, and only while the folder
is still this coordinator's; records of another plan digest are ignored, but runs once fenced stay
fenced; a placement holds from its step on until the next one, and steps below `planned_until` may
have been handed out.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataservice.actors.holes import Hole
from dataservice.actors.ownership import Ownership, take
from dataservice.config import Config
from dataservice.core.exclusions import Exclusions
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, StorageError
from dataservice.storage.journal import Journal
from dataservice.storage.tables import sync_folder
from dataservice.wire.messages import CursorState, ResumeState
from dataservice.wire.schema import decode, encode

JOURNAL = "coordinator.journal"
"""Its name in `state_dir`."""
_FRESH = ".new"
"""Ends the name of a journal that is to be put in the place of another."""
MOST_HOMES = 64
"""Placements kept of a session when the journal is rewritten; steps handed out span a few."""
STEPS_A_RECORD = 16
"""Progress is written once in so many steps; a restart plans that many again."""


Homes = tuple[int, tuple[int, ...]]
"""What a placement depends on besides the cursor: (ranks a node, home node of each lane)."""


@dataclass(slots=True)
class SavedSession:
    generation: int
    run_id: str
    grid: Grid
    state: ResumeState | None
    hosts: dict[int, tuple[str, ...]]
    """By rank, of each of its peers."""
    cursor: CursorState
    """Every rank was given all steps before it."""
    first: tuple[int, int]
    """(step, micro-step) where the session began."""
    built_by: str
    """Fingerprint of the decoders of its packs, and policy; see actors.policies."""
    homes: list[tuple[int, Homes]] = field(default_factory=list)
    """(first step, homes), steps rising."""
    planned_until: int = 0
    """Steps before it may have been handed out."""
    excluded: str = ""
    """What was left out of them on purpose, as `core.exclusions` has it."""


class Recorded:
    """What the records of a journal come to."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.holes: list[Hole] = []
        self.fenced_runs: set[str] = set()
        self.session: SavedSession | None = None
        self.digest = ""
        """Of the plan that holes and session belong to."""
        self.job = ""
        """"": not written down."""
        self.lane_holders: tuple[str, ...] = ()
        """By lane, the data node that has staged it; empty where none has for long."""
        self._generation = 0
        for record in records:
            self._replay(record)

    def _replay(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "epoch":
            self._generation = max(self._generation, record["generation"])
            self.job = record.get("job", "")
            self._digest_is(record["digest"])
        elif kind == "hole":
            self.holes.append(
                Hole(
                    key=record["key"],
                    reason=record["reason"],
                    pack_number=record["number"],
                    policy=record.get("policy", "hole"),
                    member=record.get("member", ""),
                    archive=record.get("archive", ""),
                )
            )
        elif kind == "session":
            self._session_is(
                SavedSession(
                    generation=record["generation"],
                    run_id=record["run_id"],
                    grid=Grid(
                        dp_size=record["grid"][0],
                        micro_steps=record["grid"][1],
                        packs_per_cell=record["grid"][2],
                    ),
                    state=decode(ResumeState, record["state"]) if record["state"] else None,
                    hosts={rank: _hosts(its) for rank, its in enumerate(record["hosts"])},
                    cursor=decode(CursorState, record["cursor"]),
                    first=(record["first"][0], record["first"][1]),
                    built_by=record["decoder"],
                    planned_until=record["first"][0] + (record["first"][1] > 0),
                    excluded=record.get("excluded", ""),
                )
            )
        elif kind == "fenced":
            self.fenced_runs.update(record["runs"])
        elif kind == "lanes":
            self.lane_holders = tuple(record["holders"])
        elif self.session is not None and kind == "homes":
            homes = (record["ranks_per_node"], tuple(record["homes"]))
            self.session.homes.append((record["step"], homes))
        elif self.session is not None and kind == "planned":
            self.session.planned_until = record["until"]
            self.session.excluded = record.get("excluded", "")
        elif self.session is not None and kind == "done":
            self.session.cursor = decode(CursorState, record["cursor"])

    def _digest_is(self, digest: str) -> None:
        if digest != self.digest:
            self.digest = digest
            self.holes = []
            self.lane_holders = ()
            if self.session is not None:
                self.fenced_runs.add(self.session.run_id)
            self.session = None

    def _session_is(self, session: SavedSession) -> None:
        if self.session is not None:
            self.fenced_runs.add(self.session.run_id)
        self._generation = session.generation
        self.session = session


class StateLog(Recorded):
    def __init__(self, path: str, ownership: Ownership | None = None) -> None:
        """`ownership` of the journal's folder: None where nobody else can want it. Every method
        that writes raises JobHeld once it is lost, and StorageError where nothing can be written,
        after which it may be called again."""
        self.ownership = ownership
        self._path = path
        self._fresh = f"{path}.{ownership.owner.nonce}{_FRESH}" if ownership else f"{path}{_FRESH}"
        for left in glob.glob(f"{glob.escape(path)}*{_FRESH}"):
            Path(left).unlink(missing_ok=True)  # so that its writer cannot put it in place any more
        self._journal, records = Journal.open(path)
        super().__init__(records)
        self._handed_until = self.session.planned_until if self.session is not None else 0
        """Steps of the session below this may have been handed out before this start."""

    def start_epoch(self, digest: str, job: str) -> None:
        """Called once when the plan is open; what was written for another plan is forgotten.

        ConfigError for the journal of another job, which stays as it is.
        """
        if self.job not in ("", job):
            raise ConfigError(
                f"state_dir {os.path.dirname(self._path)} holds the journal of job {self.job!r}, "
                f"this is job {job!r}: give every job a state_dir of its own, or remove the "
                "journal if that job is over"
            )
        self.job = job
        self._digest_is(digest)
        self._rewrite()

    def _rewrite(self) -> None:
        """Puts in place of the journal one that holds only what still counts."""
        journal, _ = Journal.open(self._fresh)
        journal.append(*self._records())
        self._check_ownership()
        try:
            os.replace(self._fresh, self._path)
        except FileNotFoundError:
            self._check_ownership()  # whoever has taken the folder has removed it
            raise
        sync_folder(os.path.dirname(self._path) or ".")
        self._journal.close()
        self._journal, journal.path = journal, self._path
        self._check_ownership()

    def _records(self) -> Iterator[dict[str, Any]]:
        """All that still counts."""
        yield {
            "kind": "epoch",
            "digest": self.digest,
            "generation": self._generation,
            "job": self.job,
        }
        yield {"kind": "fenced", "runs": sorted(self.fenced_runs)}
        yield from map(_hole_record, self.holes)
        if self.lane_holders:
            yield _lanes_record(self.lane_holders)
        if self.session is not None:
            yield _session_record(self.session)
            for step, homes in self.session.homes[-MOST_HOMES:]:
                yield _homes_record(step, homes)
            yield _planned_record(self.session.planned_until, self.session.excluded)

    def _append(self, record: dict[str, Any]) -> None:
        self._journal.append(record)
        self._check_ownership()

    def _check_ownership(self) -> None:
        if self.ownership is not None:
            self.ownership.check()

    def fence(self, run_ids: Iterable[str]) -> None:
        """These runs are over before they began: a newer one has opened."""
        runs = sorted(run_ids)
        if runs:
            self._append({"kind": "fenced", "runs": runs})
            self.fenced_runs.update(runs)

    def hole(self, hole: Hole) -> None:
        self._append(_hole_record(hole))

    def lanes(self, holders: tuple[str, ...]) -> None:
        self._append(_lanes_record(holders))
        self.lane_holders = holders

    def open_session(
        self,
        run_id: str,
        grid: Grid,
        state: ResumeState | None,
        hosts: Mapping[int, tuple[str, ...]],
        cursor: CursorState,
        built_by: str,
    ) -> int:
        """Returns the new session's generation number."""
        session = SavedSession(
            generation=self._generation + 1,
            run_id=run_id,
            grid=grid,
            state=state,
            hosts=dict(hosts),
            cursor=cursor,
            first=(cursor.step, state.micro_step if state is not None else 0),
            built_by=built_by,
            planned_until=cursor.step + (state is not None and state.micro_step > 0),
            excluded=cursor.excluded,
        )
        self._append(_session_record(session))
        self._session_is(session)
        self._handed_until = 0
        return session.generation

    def homes_of(self, step: int) -> Homes | None:
        """Of a step that may have been handed out before this start, else None."""
        session = self.session
        if session is None or step >= self._handed_until:
            return None
        known = [homes for first, homes in session.homes if first <= step]
        return known[-1] if known else None

    def placement(self, cursor: CursorState, exclude: Exclusions) -> None:
        """The step that starts at `cursor` is about to be handed out with its homes."""
        session = self.session
        assert session is not None
        homes = (cursor.ranks_per_node, cursor.lane_homes)
        if not session.homes or (
            session.homes[-1][0] <= cursor.step and session.homes[-1][1] != homes
        ):
            self._append(_homes_record(cursor.step, homes))
            session.homes.append((cursor.step, homes))
        if cursor.step >= session.planned_until:
            until = cursor.step + STEPS_A_RECORD
            excluded = exclude.in_force(until - 1)
            self._append(_planned_record(until, excluded))
            session.planned_until, session.excluded = until, excluded

    def done(self, cursor: CursorState) -> None:
        """Every rank was given all steps before `cursor`."""
        session = self.session
        assert session is not None
        if cursor.step >= session.cursor.step + STEPS_A_RECORD:
            self._append({"kind": "done", "cursor": encode(cursor)})
            session.cursor = cursor

    def close(self) -> None:
        self._journal.close()
        if self.ownership is not None:
            self.ownership.release()


def open_state(config: Config) -> StateLog:
    """The journal of `state_dir`, which is this process's until the log is closed; may wait for
    some leases of its last owner. Raises JobHeld, which names another that has it, and
    StorageError."""
    folder = Path(config.state_dir)
    try:
        ownership = take(folder, job=config.job, lease_s=config.serving.lease_s)
        try:
            return StateLog(str(folder / JOURNAL), ownership)
        except BaseException:
            ownership.release()
            raise
    except OSError as error:
        raise StorageError(f"state_dir {folder} cannot be used: {error}") from error


def _hosts(recorded: str | list[str]) -> tuple[str, ...]:
    """Of a rank's peers; a rank without them may be recorded by its one host."""
    return (recorded,) if isinstance(recorded, str) else tuple(recorded)


def _hole_record(hole: Hole) -> dict[str, Any]:
    return {
        "kind": "hole",
        "key": hole.key,
        "reason": hole.reason,
        "number": hole.pack_number,
        "policy": hole.policy,
        "member": hole.member,
        "archive": hole.archive,
    }


def _lanes_record(holders: tuple[str, ...]) -> dict[str, Any]:
    return {"kind": "lanes", "holders": list(holders)}


def _homes_record(step: int, homes: Homes) -> dict[str, Any]:
    return {"kind": "homes", "step": step, "ranks_per_node": homes[0], "homes": list(homes[1])}


def _planned_record(until: int, excluded: str) -> dict[str, Any]:
    return {"kind": "planned", "until": until, "excluded": excluded}


def _session_record(session: SavedSession) -> dict[str, Any]:
    grid, state = session.grid, session.state
    return {
        "kind": "session",
        "generation": session.generation,
        "run_id": session.run_id,
        "grid": [grid.dp_size, grid.micro_steps, grid.packs_per_cell],
        "state": encode(state) if state is not None else b"",
        "hosts": [list(session.hosts[rank]) for rank in range(grid.dp_size)],
        "cursor": encode(session.cursor),
        "first": list(session.first),
        "decoder": session.built_by,
        "excluded": session.excluded,
    }
