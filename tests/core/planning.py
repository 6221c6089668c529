"""Small plans over a synthetic index, and what their tests ask of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from dataservice.core.cursor import Cursor
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, PlanSettings, SourceShare
from dataservice.core.tables import REASONS, StepPlan, WindowPlan
from tests.core.synthetic import SyntheticIndex, SyntheticSource

INDEX = SyntheticIndex(
    [
        SyntheticSource(name="text", num_samples=600, num_shards=5),
        SyntheticSource(name="caption", num_samples=250, num_shards=3, kind="caption", salt=1),
        SyntheticSource(name="multi", num_samples=41, num_shards=2, kind="mixed", salt=2),
    ]
)
NAMES = ("text", "caption", "multi")


def make_plan(index: SyntheticIndex = INDEX, **changes: Any) -> Plan:
    """Finite, one epoch, unless the changes say otherwise."""
    given = {
        "sources": tuple(SourceShare(name=source.name) for source in index.sources),
        "seed": 11,
        "pack_length": 2048,
        "packer": "lbf",
        "segment": 8,
        "open_segments": 3,
        **changes,
    }
    return Plan(PlanSettings(**given), index)


def endless_plan(weights: tuple[str, ...] = ("0.5", "0.3", "0.2"), **changes: Any) -> Plan:
    sources = tuple(SourceShare(name=n, weight=w) for n, w in zip(NAMES, weights, strict=True))
    return make_plan(**{"sources": sources, "epochs": None, **changes})


def steps_of(plan: Plan, grid: Grid, cursor: Cursor | None = None) -> Iterator[StepPlan]:
    """To the end, from the start or a cursor."""
    step = plan.step(plan.start() if cursor is None else cursor, grid)
    while step is not None:
        yield step
        step = plan.step(step.next_cursor, grid)


def pack_ids(step: StepPlan) -> list[str]:
    """In global order, without padding."""
    return [step.pack_id(i) for i in np.flatnonzero(step.lane >= 0).tolist()]


def same(a: object, b: object) -> bool:
    """Whether two records of arrays are equal in every field."""
    return type(a) is type(b) and all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(a)  # type: ignore[arg-type]
    )


def windows_of(plan: Plan) -> Iterator[WindowPlan]:
    """All of a finite plan."""
    for lane in range(plan.num_lanes):
        count = plan.windows_in(lane)
        assert count is not None
        for window in range(count):
            yield plan.window(lane, window)


def counted(plan: Plan, reason: str) -> Any:
    """By source number, over all windows of a finite plan."""
    return sum(window.counts[REASONS.index(reason)] for window in windows_of(plan))


Item = tuple[int, int, int, int]
"""(lane, window, source number, row)"""


def items_of(window: WindowPlan, begin: int = 0, end: int | None = None) -> Counter[Item]:
    """How many items there are of each sample."""
    rows = zip(window.source[begin:end].tolist(), window.row[begin:end].tolist(), strict=True)
    return Counter((window.lane, window.window, source, row) for source, row in rows)


def items_in(plan: Plan, steps: list[StepPlan]) -> Counter[Item]:
    """Of the steps' packs."""
    found: Counter[Item] = Counter()
    for step in steps:
        for i in np.flatnonzero(step.lane >= 0).tolist():
            window = plan.window(int(step.lane[i]), int(step.window[i]))
            begin, end = window.item_offsets[int(step.number[i]) :][:2].tolist()
            found += items_of(window, begin, end)
    return found


def lost_in(plan: Plan, delivered: Counter[Item], phases: range | None = None) -> list[int]:
    """By source number: samples given up in phases (None: all, of a finite plan), window by window.

    Of windows up to a lane's last delivered one those of which an item is missing, of later ones
    all that they read; none in a lane without a missing item.
    """
    first_lane = 0
    lost: Counter[int] = Counter()
    for stream in plan.streams:
        for phase in stream.phases if phases is None else [stream.phases[p] for p in phases]:
            assert phase.end_window is not None
            for lane in range(first_lane, first_lane + stream.num_lanes):
                windows = range(phase.first_window, phase.end_window)
                lost += _lost_in_lane([plan.window(lane, w) for w in windows], delivered)
        first_lane += stream.num_lanes
    return [lost[source] for source in range(len(plan._index.sources))]


def _lost_in_lane(windows: list[WindowPlan], delivered: Counter[Item]) -> Counter[int]:
    missing = [items_of(window) - delivered for window in windows]
    lost: Counter[int] = Counter()
    if not any(missing):
        return lost
    opened = [i for i, w in enumerate(windows) if any(item in delivered for item in items_of(w))]
    for i, window in enumerate(windows):
        if i <= max(opened, default=-1):
            lost.update(item[2] for item in missing[i])
            continue
        lost.update(window.source[window.start == 0].tolist())
        for reason in ("dropped_long", "rejected"):
            lost.update(dict(enumerate(window.counts[REASONS.index(reason)].tolist())))
    return lost
