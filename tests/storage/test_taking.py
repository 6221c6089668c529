from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.errors import ConfigError
from dataservice.storage.taking import Picker, taken_rows

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(counts=COUNTS, amount=st.integers(0, 200), how=st.sampled_from(["first", "end", "random"]))
@settings(deadline=None)
def test_so_many_are_taken(counts: list[int], amount: int, how: str) -> None:
    taken = taken_rows(f"{how}:{amount}", counts)
    rows = [of.rows().tolist() for of in taken]
    assert [len(found) for found in rows] == [of.num_rows for of in taken]
    assert sum(map(len, rows)) == min(amount, sum(counts))
    flat = [sum(counts[:shard]) + row for shard, found in enumerate(rows) for row in found]
    assert all(row < count for found, count in zip(rows, counts, strict=True) for row in found)
    assert flat == sorted(set(flat))
    if how == "first":
        assert flat == list(range(len(flat)))
    if how == "end":
        assert flat == list(range(sum(counts) - len(flat), sum(counts)))
    assert taken == taken_rows(f"{how}:{amount}", counts)


@given(counts=COUNTS, take=st.sampled_from(["all", "first:30%", "end:7", "random:12.5%"]))
@settings(deadline=None)
def test_a_picker_gives_the_same_rows_part_by_part(counts: list[int], take: str) -> None:
    for of, count in zip(taken_rows(take, counts), counts, strict=True):
        picker = Picker(of)
        parts = [row for low in range(0, count, 7) for row in picker.between(low, low + 7)]
        assert parts == of.rows().tolist()


def test_shares() -> None:
    def count(take: str, total: int) -> int:
        return sum(of.num_rows for of in taken_rows(take, [total]))

    assert [count(f"first:{share}", 1000) for share in ("10%", "12.5%", "0.1%", "100%")] == [
        100,
        125,
        1,
        1000,
    ]
    assert count("first:33%", 10) == 3 and count("random:1%", 10) == 1 and count("end:0%", 10) == 0
    assert count("random:50%", 0) == 0
    for take in ("some", "first:", "first:x%", "last:3"):
        with pytest.raises(ConfigError, match="take: "):
            count(take, 10)
