"""The planning process's part of a lazy index: which blocks a plan needs, what becomes of counted
ones.

Invariants: blocks are named in the order of need and at most MOST_BLOCKS at once; one that cannot
be counted or is not what it says is answered with the reason; while the index is opened what is
missing is counted here, later it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataservice.actors.count_messages import found_of, job_of
from dataservice.actors.plan_messages import AheadRequest, BlocksKept, MissingBlocks
from dataservice.config import Config
from dataservice.core.cursor import Cursor
from dataservice.core.lru import LRUCache
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, StaleIndexError, WireError
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.lazy import BlocksMissing, CountingHere, Key, LazyIndex, Outcome
from dataservice.wire.counting import CountedBlock, Roots

MOST_BLOCKS = 2048
"""In one answer, about 1 kB each."""
_KEPT_WINDOWS = 1024


class LazyPlanning:
    def __init__(self, config: Config, renderer: TextRenderer) -> None:
        self.index = LazyIndex.open(config.index_dir)
        self._here = CountingHere(
            self.index,
            config.sources,
            renderer,
            deadline_s=config.staging.deadline_s,
            retries=config.staging.retries,
        )
        self.counted = BlocksKept(blocks=0, rows=0, rejected=0)
        """While the index is opened."""
        self.index.blocks.on_missing = self._count_at_once
        self._windows: LRUCache[tuple[int, int], list[Key]] = LRUCache(_KEPT_WINDOWS)
        """(lane, window) -> the blocks it needs that were not counted when last looked at."""

    def _count_at_once(self, keys: Sequence[Key]) -> None:
        """Raises what one of them failed with."""
        outcomes = self._here.count(keys)
        kept, before = _kept(outcomes), self.counted
        self.counted = BlocksKept(
            blocks=before.blocks + kept.blocks,
            rows=before.rows + kept.rows,
            rejected=before.rejected + kept.rejected,
        )
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error

    def opened(self) -> None:
        """From now on what is missing is raised as BlocksMissing."""
        self.index.blocks.on_missing = _raise

    def close(self) -> None:
        self._here.close()
        self.index.close()

    def missing(self, plan: Plan, lane: int, window: int) -> list[Key]:
        """The blocks of a window that are not counted yet."""
        known = self._windows.get(
            (lane, window), lambda: self.index.missing(*plan.samples(lane, window))
        )
        if known:
            known[:] = self.index.blocks.still_missing(known)
        return known

    def check_step(self, plan: Plan, cursor: Cursor, grid: Grid) -> None:
        """Raises BlocksMissing with all that the windows lack that a step begins with."""
        lanes = _from(cursor)[: grid.num_packs]
        missing = [
            key
            for lane in lanes
            if _exists(plan, lane, cursor.lanes[lane][0])
            for key in self.missing(plan, lane, cursor.lanes[lane][0])
        ]
        if missing:
            raise BlocksMissing(list(dict.fromkeys(missing)))

    def check_needs(self, plan: Plan, cursor: Cursor, windows_ahead: int) -> None:
        """Raises BlocksMissing with all that the next windows of the lanes lack."""
        missing: dict[Key, None] = {}
        for lane, window in _windows_ahead(plan, cursor, windows_ahead):
            missing |= dict.fromkeys(self.missing(plan, lane, window))
        if missing:
            raise BlocksMissing(list(missing))

    def ahead(self, plan: Plan, cursor: Cursor, request: AheadRequest) -> MissingBlocks:
        found: dict[Key, None] = {}
        for lane, window in _windows_ahead(plan, cursor, request.windows_ahead):
            found |= dict.fromkeys(self.missing(plan, lane, window))
            if len(found) >= request.most:
                break
        return self.jobs(list(found)[: request.most])

    def jobs(self, keys: Sequence[Key]) -> MissingBlocks:
        return MissingBlocks(
            blocks=tuple(job_of(self.index.blocks.place(key)) for key in keys[:MOST_BLOCKS])
        )

    def keep(self, blocks: Sequence[CountedBlock]) -> BlocksKept:
        """Raises StorageError where nothing can be kept for now."""
        outcomes = []
        for counted in blocks:
            key = counted.file, counted.block
            try:
                kept = self.index.blocks.keep(key, counted.rows)
                outcomes.append(Outcome(key=key, kept=kept, error=None))
            except WireError as error:
                outcomes.append(Outcome(key=key, kept=None, error=error))
        return _kept(outcomes)

    def count(self, keys: Sequence[Sequence[int]]) -> BlocksKept:
        return _kept(self._here.count([(file, block) for file, block in keys]))

    def roots(self, source: str) -> Roots:
        try:
            roots = self.index.roots(source)
        except KeyError:
            raise ConfigError(f"source {source!r} is not in the index") from None
        return Roots(roots=tuple(map(found_of, roots)))


def _kept(outcomes: Sequence[Outcome]) -> BlocksKept:
    new = [outcome.kept for outcome in outcomes if outcome.kept is not None]
    return BlocksKept(
        blocks=len(new),
        rows=sum(kept.rows for kept in new),
        rejected=sum(kept.rejected for kept in new),
        failed=tuple(
            CountedBlock(
                file=outcome.key[0],
                block=outcome.key[1],
                reason=str(outcome.error),
                fatal=isinstance(outcome.error, StaleIndexError),
            )
            for outcome in outcomes
            if outcome.error is not None
        ),
    )


def _raise(keys: Sequence[Key]) -> None:
    raise BlocksMissing(keys)


def _from(cursor: Cursor) -> list[int]:
    """All lanes in the order in which they give the next packs."""
    lanes = range(len(cursor.lanes))
    return [*lanes[cursor.next_lane[0] :], *lanes[: cursor.next_lane[0]]]


def _windows_ahead(plan: Plan, cursor: Cursor, count: int) -> Iterator[tuple[int, int]]:
    for ahead in range(count):
        for lane in _from(cursor):
            window = cursor.lanes[lane][0] + ahead
            if _exists(plan, lane, window):
                yield lane, window


def _exists(plan: Plan, lane: int, window: int) -> bool:
    last = plan.windows_in(lane)
    return last is None or window < last
