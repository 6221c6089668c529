from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from core.synthetic import SyntheticIndex, SyntheticSource

from dataservice.actors import shard_needs
from dataservice.actors.shard_needs import ShardNeeds
from dataservice.actors.staging_desk import both
from dataservice.core.packspec import ShardRef
from dataservice.core.plan import Plan
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.core.tables import WindowPlan
from dataservice.wire.shards import Shard
from dataservice.wire.staging import ShardNeed

AHEAD = 2


class Index(SyntheticIndex):
    """Record file i of a source, and a zip of the same number where it has images."""

    def __init__(self) -> None:
        super().__init__(
            [
                SyntheticSource(name="books", num_samples=20_000, num_shards=200),
                SyntheticSource(name="pairs", num_samples=20_000, num_shards=200, kind="caption"),
            ]
        )
        self.planned: list[tuple[int, int]] = []

    def ref(self, source: int, number: int, ending: str) -> ShardRef:
        name = f"{self.sources[source].name}{number}{ending}"
        return ShardRef(
            source=self.sources[source].name, name=name, url=name, size_bytes=9, mtime_ns=1
        )

    def shards_beside(self, source: int, number: int) -> tuple[ShardRef, ...]:
        endings = (".jsonl", ".zip")[: 1 + (source == 1)]
        return tuple(self.ref(source, number, ending) for ending in endings)

    def shards_of(self, window: WindowPlan) -> tuple[ShardRef, ...]:
        self.planned.append((window.lane, window.window))
        found: dict[ShardRef, None] = {}
        for source, row in zip(window.source.tolist(), window.row.tolist(), strict=True):
            found.update(dict.fromkeys(self.shards_beside(source, row // 100)))
        return tuple(found)

    def shard_crc(self, shard: ShardRef) -> int:
        return len(shard.name) if shard.name.endswith("jsonl") else -1


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def plan(index: Index) -> Plan:
    sources = (SourceShare(name="books", weight="1"), SourceShare(name="pairs", weight="3"))
    return Plan(PlanSettings(sources=sources, epochs=None, lanes=4, window=256, segment=32), index)


def files_of(plan: Plan, lane: int, window: int) -> list[str]:
    """Of each sample, without the ending."""
    pairs = zip(*map(np.ndarray.tolist, plan.samples(lane, window)), strict=True)
    return [f"{('books', 'pairs')[source]}{row // 100}" for source, row in pairs]


def first_uses(plan: Plan, lane: int, window: int, windows: int) -> dict[str, int]:
    """Record files by name, and how far ahead they are read first."""
    found: dict[str, int] = {}
    for ahead in range(windows):
        for source, row in zip(
            *map(np.ndarray.tolist, plan.samples(lane, window + ahead)), strict=True
        ):
            found.setdefault(f"{('books', 'pairs')[source]}{row // 100}.jsonl", ahead)
    return found


def test_near_needs_are_to_be_copied_and_later_ones_only_ranked(index: Index, plan: Plan) -> None:
    needs = ShardNeeds(plan, index).of_lanes([0, 3, 0, 7], AHEAD)
    for lane, window in enumerate([0, 3, 0, 7]):
        records = {n.shard.name: n for n in needs[lane] if n.shard.name.endswith(".jsonl")}
        expected = first_uses(plan, lane, window, shard_needs.WINDOWS_KNOWN)
        assert {name: need.next_use for name, need in records.items()} == expected
        assert {need.copy for need in needs[lane] if need.next_use < AHEAD} == {True}
        assert {need.copy for need in needs[lane] if need.next_use >= AHEAD} == {False}
        for need in needs[lane]:
            if need.shard.name.endswith(".zip"):
                assert records[need.shard.name.replace("zip", "jsonl")].next_use == need.next_use
        assert len({need.shard.name for need in needs[lane]}) == len(needs[lane])
        assert all(
            need.crc32 == (-1 if need.shard.name.endswith("zip") else len(need.shard.name))
            for need in needs[lane]
        )


def test_the_share_is_what_the_next_windows_read_of_a_file(index: Index, plan: Plan) -> None:
    found = ShardNeeds(plan, index).of_lanes([5, 5, 5, 5], AHEAD)[2]
    read = Counter(files_of(plan, 2, 5) + files_of(plan, 2, 6))
    near = [need for need in found if need.copy]
    assert near
    for need in near:
        assert need.share == pytest.approx(
            min(1, read[need.shard.name.split(".")[0]] / 100), abs=1e-4
        )
    assert {need.share for need in found if not need.copy} == {0.0}


def test_windows_are_looked_up_once(
    index: Index, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[tuple[int, int]] = Counter()
    real = plan.samples

    def samples(lane: int, window: int) -> object:
        asked[lane, window] += 1
        return real(lane, window)

    monkeypatch.setattr(plan, "samples", samples)
    needs = ShardNeeds(plan, index)
    for window in range(5):
        needs.of_lanes([window] * 4, AHEAD)
    assert set(asked) == set(itertools.product(range(4), range(4 + shard_needs.WINDOWS_KNOWN)))
    assert set(asked.values()) == {1}
    monkeypatch.setattr(shard_needs, "_NEW_WINDOWS", 10)
    asked.clear()
    fresh = ShardNeeds(plan, index)
    fresh.of_lanes([0] * 4, AHEAD)
    assert len(asked) == 4 * AHEAD + 10
    assert max(window for _, window in asked) == AHEAD + 2


def test_a_lazy_index_is_not_asked_for_what_it_has_not_counted(index: Index, plan: Plan) -> None:
    read_before = index.rows_read
    needs = ShardNeeds(plan, index).of_lanes([0] * 4, AHEAD, counted_only=True)
    assert index.planned == [] and index.rows_read == read_before
    counted = ShardNeeds(plan, index).of_lanes([0] * 4, AHEAD)
    assert [set(lane) for lane in needs] == [set(lane) for lane in counted]


def test_the_end_of_the_data_is_no_need(index: Index) -> None:
    settings = PlanSettings(
        sources=(SourceShare(name="books"), SourceShare(name="pairs")), lanes=2, window=5000
    )
    plan = Plan(settings, index)
    last = plan.windows_in(0)
    assert last is not None
    needs = ShardNeeds(plan, index).of_lanes([last - 1, last], AHEAD)
    assert {need.next_use for need in needs[0]} == {0}
    assert needs[1] == ()


def test_what_two_lanes_need_of_a_shard_adds_up() -> None:
    def need(next_use: int, copy: bool, share: float) -> ShardNeed:
        return ShardNeed(
            shard=Shard(source="s", name="n", url="u", size_bytes=1, mtime_ns=1),
            crc32=-1,
            next_use=next_use,
            copy=copy,
            share=share,
        )

    assert both(need(7, False, 0.0), need(1, True, 0.2)) == need(1, True, 0.2)
    assert both(need(0, True, 0.7), need(1, True, 0.5)) == need(0, True, 1.0)
