from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.order import (
    MixedOrder,
    SourceOrder,
    epoch_order,
    interleave,
    permutation,
    random_words,
)


def test_words_are_pinned() -> None:
    """A change here changes every plan: raise PLAN_VERSION with it."""
    assert random_words(2, 7, "window", 3, 4).tolist() == [
        17939718495670439719,
        10425006581159365877,
    ]
    assert permutation(8, 7, "window", 3, 4).tolist() == [2, 1, 5, 7, 4, 3, 0, 6]


def test_keys_do_not_collide() -> None:
    keys = [(1, "a", 12), (1, "a", 1, 2), (11, "a", 2), (1, "a1", 2), (1, "a", 2), (1, "b", 2)]
    words = {tuple(random_words(4, *key).tolist()) for key in keys}
    assert len(words) == len(keys)


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 300),
    segment=st.integers(1, 40),
    width=st.integers(1, 12),
    seed=st.integers(0, 50),
)
def test_interleave_is_the_round_robin_walk(size: int, segment: int, width: int, seed: int) -> None:
    segments = permutation(-(-size // segment), seed, "test")
    walked: list[int] = []
    for first in range(0, len(segments), width):
        queues = [
            list(range(s * segment, min((s + 1) * segment, size)))
            for s in segments[first : first + width].tolist()
        ]
        while any(queues):
            walked += [queue.pop(0) for queue in queues if queue]
    short_at = epoch_order(segments).short_at
    places = np.arange(size, dtype=np.int64)
    assert interleave(places, segments, size, short_at, segment, width).tolist() == walked
    some = permutation(size, seed, "places")[:5]
    found = interleave(some, segments, size, short_at, segment, width)
    assert found.tolist() == [walked[i] for i in some]


def _order(shards: tuple[int, ...], lanes: int, **changes: int) -> SourceOrder:
    given = {"seed": 3, "segment": 4, "open_segments": 3, **changes}
    return SourceOrder("s", shards, num_lanes=lanes, **given)


def _rows(order: SourceOrder, lane: int, first: int, stop: int) -> list[int]:
    return MixedOrder([order]).rows(lane, [(first, stop)]).tolist()


@settings(deadline=None, max_examples=100)
@given(
    shards=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    lanes=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_lanes_partition_the_source_each_epoch(shards: list[int], lanes: int, epoch: int) -> None:
    order = _order(tuple(shards), lanes)
    rows: list[int] = []
    for lane in range(lanes):
        size = order.lane_size(lane)
        if size:
            rows += _rows(order, lane, epoch * size, (epoch + 1) * size)
    assert sorted(rows) == list(range(sum(shards)))


def test_a_lane_owns_the_same_samples_every_epoch_in_another_order() -> None:
    order = _order((50, 30, 20), 2)
    size = order.lane_size(0)
    rows = _rows(order, 0, 0, 2 * size)
    assert sorted(rows[:size]) == sorted(rows[size:])
    assert rows[:size] != rows[size:]


def test_shards_stay_together() -> None:
    """A lane of four touches at most two of four equal shards, whatever the seed."""
    for seed in range(20):
        order = _order((25, 25, 25, 25), 4, seed=seed)
        rows = _rows(order, 1, 0, order.lane_size(1))
        assert len({row // 25 for row in rows}) == 1


def test_seed_moves_shards_between_lanes() -> None:
    held = set()
    for seed in range(20):
        order = _order((25, 25, 25, 25), 4, seed=seed)
        held.add(_rows(order, 0, 0, 1)[0] // 25)
    assert held == {0, 1, 2, 3}


def test_many_epochs_of_a_tiny_source() -> None:
    order = _order((2,), 2)
    assert _rows(order, 1, 0, 1000) == _rows(order, 1, 0, 1) * 1000


@settings(deadline=None, max_examples=60)
@given(
    sources=st.lists(
        st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any), min_size=1, max_size=5
    ),
    lanes=st.integers(1, 5),
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=5, max_size=5),
)
def test_sources_read_together_are_as_read_alone(
    sources: list[list[int]], lanes: int, spans: list[tuple[int, int]]
) -> None:
    """Any span of any source equals the positions taken one by one, epochs included."""
    orders = [
        SourceOrder(f"s{i}", tuple(shards), seed=3, num_lanes=lanes, segment=4, open_segments=3)
        for i, shards in enumerate(sources)
    ]
    for lane in range(lanes):
        sizes = [order.lane_size(lane) for order in orders]
        asked = [
            (first, first + count if size else first)
            for (first, count), size in zip(spans, sizes, strict=False)
        ]
        together = MixedOrder(orders).rows(lane, asked).tolist()
        alone = [
            row
            for order, (first, stop) in zip(orders, asked, strict=True)
            for position in range(first, stop)
            for row in _rows(order, lane, position, position + 1)
        ]
        assert together == alone
