"""A past step of a run, built again: the packs that its ranks were given, byte for byte.

Invariants: nothing is written where the service writes, so it may run; the place of a step follows
from a saved state as for a run that goes on, and one that the state does not belong to is refused;
holes are those that were recorded, and are not read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataservice.actors.holes import Hole
from dataservice.actors.offline import OfflineSteps, PlacedPack
from dataservice.actors.planner import cursor_of
from dataservice.actors.policies import decoder_and_policy, policy_of
from dataservice.actors.quarantine import PLAN_DIGITS, QUARANTINE
from dataservice.actors.resuming import check_state
from dataservice.actors.state_log import JOURNAL, Homes, Recorded, SavedSession
from dataservice.actors.steps import ActiveStep
from dataservice.config import Config
from dataservice.core.cursor import Cursor
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, ResumeRefused
from dataservice.pipeline.images import decoder_fingerprint
from dataservice.storage.journal import JournalDamaged, read_journal
from dataservice.wire.messages import CursorState, ResumeState


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What is known of the run besides its state."""

    holes: tuple[Hole, ...]
    told_by: str
    """The file that holes were read from; "" for none."""
    session: SavedSession | None = None
    """That the journal still holds."""


def history_of(config: Config, plan_digest: str, path: str | None) -> History:
    """Of the journal or quarantine file at `path`, else of what the service has in `state_dir`.

    ConfigError for a file that cannot be read, or is neither.
    """
    if path is not None:
        try:
            return _history_in(path, plan_digest)
        except OSError as error:
            raise ConfigError(f"--holes {path} cannot be read: {error.strerror}") from error
    for name in (JOURNAL, QUARANTINE):  # a journal forgets the holes of plans before
        own = os.path.join(config.state_dir, name)
        with contextlib.suppress(FileNotFoundError):
            found = _history_in(own, plan_digest)
            if found.told_by:
                return found
    return History(holes=(), told_by="")


def _history_in(path: str, plan_digest: str) -> History:
    """`told_by` is "" where the file has nothing of this plan."""
    try:
        recorded = Recorded(read_journal(path))
    except JournalDamaged:
        if os.path.basename(path) == JOURNAL:
            raise
        holes = _quarantined(path, plan_digest[:PLAN_DIGITS])
        return History(holes=holes, told_by=path if holes else "")
    if recorded.digest != plan_digest:
        return History(holes=(), told_by="")
    return History(holes=tuple(recorded.holes), told_by=path, session=recorded.session)


def _quarantined(path: str, plan: str) -> tuple[Hole, ...]:
    holes = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            if found["plan"] != plan:
                continue
            what = "record" if found["image"] is None else found["image"]
            holes.append(
                Hole(
                    key=f"{found['sample']}#{what}",
                    reason=found["reason"],
                    pack_number=found["pack"],
                    policy=found["policy"],
                    member=found["member"],
                    archive=found["archive"],
                )
            )
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--holes {path}: line {number} is no hole ({error}); give a service's "
                f"{JOURNAL} or {QUARANTINE}"
            ) from None
    return tuple(holes)


class Replay:
    """Of the run that `state` was saved in. Close it at the end."""

    def __init__(
        self, config: Config, state: ResumeState, *, holes: str | None, say: Callable[[str], None]
    ) -> None:
        """`say` is told what to know about it, in words. ResumeRefused for a state of another job,
        plan or exclusions."""
        errors = dataclasses.replace(config.errors, bad_image=policy_of(state.decoder))
        self.config = dataclasses.replace(config, errors=errors)
        self.state = state
        self.grid = Grid(
            dp_size=state.dp_size,
            micro_steps=state.micro_steps,
            packs_per_cell=state.packs_per_cell,
        )
        self._say = say
        self._steps = OfflineSteps(self.config, self.grid, say=say)
        try:
            self._check()
            self.history = history_of(config, self.plan_digest, holes)
        except BaseException:
            self.close()
            raise

    @property
    def plan_digest(self) -> str:
        return self._steps.plan_digest

    @property
    def renderer(self) -> Any:
        return self._steps.renderer

    def close(self) -> None:
        self._steps.close()

    def _check(self) -> None:
        check_state(
            self.state,
            grid=self.grid,
            job=self.config.job,
            plan=self._steps.planner.info(),
            built_by=self.state.decoder,
            exclude=self.config.exclude,
        )
        decoder, here = decoder_and_policy(self.state.decoder)[0], decoder_fingerprint()
        if decoder != here:
            self._say(
                f"warning: the run decoded with {decoder}, this machine does with {here}: pixels "
                "may differ; install the same image libraries for the same bytes"
            )

    def step(self, number: int) -> ActiveStep:
        """ConfigError for a step behind the end, ResumeRefused for one before the state that the
        state's sizes do not lead from."""
        cursor = self._cursor_at(number)
        active = None
        if cursor.step == number:
            active = self._steps.step(cursor, self._homes(number))
        if active is None:
            raise ConfigError(f"--step {number}: the data ends before it")
        return active

    def packs(self, active: ActiveStep, rank: int | None) -> Iterator[PlacedPack]:
        """Of one rank or all, in the order of micro-steps."""
        if rank is not None and not 0 <= rank < self.grid.dp_size:
            raise ConfigError(
                f"--rank {rank}: the state's run has ranks 0 to {self.grid.dp_size - 1}"
            )
        ranks = range(self.grid.dp_size) if rank is None else (rank,)
        for pack in self._steps.packs(active, ranks, self._holes_of):
            for key, reason in pack.built.new_holes.items():
                self._say(
                    f"warning: pack {pack.spec.pack_id}: a hole that was not recorded: {key}: "
                    f"{reason}"
                )
            yield pack

    # ---- where the step is -----------------------------------------------------------------------

    def _cursor_at(self, number: int) -> Cursor:
        saved = cursor_of(self.state.cursor)
        if number >= saved.step:
            return self._steps.skipped_to(saved, number)
        cursor = self._steps.skipped_to(self._steps.planner.plan.start(), number)
        if self._steps.skipped_to(cursor, saved.step) != saved:
            raise ResumeRefused(
                f"step {number} lies before the state, and from the beginning of the data its "
                f"sizes (dp_size {self.grid.dp_size}, micro_steps {self.grid.micro_steps}, "
                f"packs_per_cell {self.grid.packs_per_cell}) do not lead to it: the run had others "
                f"for a time; give a state that was saved at step {number} or shortly before"
            )
        return cursor

    def _homes(self, number: int) -> Homes:
        """What the step's placement depended on, as far as is known."""
        saved: CursorState = self.state.cursor
        session = self.history.session
        if session is not None and session.grid == self.grid and number != saved.step:
            known = [homes for first, homes in session.homes if first <= number]
            if known:
                return known[-1]
        if number != saved.step and saved.ranks_per_node:
            self._say(
                "warning: which data nodes were up at this step is not recorded any more; the "
                "step's packs are right, which rank had which may differ"
            )
        return saved.ranks_per_node, saved.lane_homes

    def _holes_of(self, active: ActiveStep, i: int) -> dict[str, str]:
        """Those met in a later pack did not count for this one yet: it is tried again."""
        samples, number = frozenset(active.sample_keys(i)), active.number(i)
        found: dict[str, str] = {}
        if self.config.errors.bad_image != "fail":
            found = {
                hole.key: hole.reason
                for hole in self.history.holes
                if hole.sample in samples and hole.pack_number <= number
            }
        return found | active.excluded(i)
