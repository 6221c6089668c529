from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.order import SourceOrder, interleave, permutation, random_words


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
    places = np.arange(size, dtype=np.int64)
    assert interleave(places, segments, size, segment, width).tolist() == walked
    some = permutation(size, seed, "places")[:5]
    assert interleave(some, segments, size, segment, width).tolist() == [walked[i] for i in some]


def _order(shards: tuple[int, ...], lanes: int, **changes: int) -> SourceOrder:
    given = {"seed": 3, "segment": 4, "open_segments": 3, **changes}
    return SourceOrder("s", shards, num_lanes=lanes, **given)


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
            rows += order.rows(lane, epoch * size + np.arange(size, dtype=np.int64)).tolist()
    assert sorted(rows) == list(range(sum(shards)))


def test_a_lane_owns_the_same_samples_every_epoch_in_another_order() -> None:
    order = _order((50, 30, 20), 2)
    size = order.lane_size(0)
    first, second = order.rows(0, np.arange(2 * size, dtype=np.int64)).reshape(2, size)
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()


def test_shards_stay_together() -> None:
    """A lane of four touches at most two of four equal shards, whatever the seed."""
    for seed in range(20):
        order = _order((25, 25, 25, 25), 4, seed=seed)
        rows = order.rows(1, np.arange(order.lane_size(1), dtype=np.int64))
        assert len(set((rows // 25).tolist())) == 1


def test_seed_moves_shards_between_lanes() -> None:
    held = set()
    for seed in range(20):
        order = _order((25, 25, 25, 25), 4, seed=seed)
        held.add(int(order.rows(0, np.zeros(1, dtype=np.int64))[0]) // 25)
    assert held == {0, 1, 2, 3}


def test_many_epochs_of_a_tiny_source() -> None:
    order = _order((2,), 2)
    assert (
        order.rows(1, np.arange(1000, dtype=np.int64)).tolist()
        == [order.rows(1, np.zeros(1, dtype=np.int64))[0]] * 1000
    )
