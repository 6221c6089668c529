"""Room for aligned documents: enough for any way to cut, exact for samples of one document."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.alignment import padded, room
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, Phase
from dataservice.core.simulate.pool import pool_of
from dataservice.errors import ConfigError
from tests.core.planning import make_plan, steps_of, windows_of
from tests.core.synthetic import SyntheticIndex, SyntheticSource

DOCUMENTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
ALIGN = st.integers(1, 24)


def one(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def places(documents: list[int], start: int, stop: int, align: int) -> int:
    """That the tokens start:stop of the documents take, each one aligned."""
    taken = first = 0
    for length in documents:
        tokens = max(0, min(first + length, stop) - max(first, start))
        taken += -(-tokens // align) * align
        first += length
    return taken


@settings(deadline=None)
@given(documents=DOCUMENTS, align=ALIGN, data=st.data())
def test_any_tokens_of_a_sample_fit_what_is_counted_for_them(
    documents: list[int], align: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, sum(documents) - 1))
    stop = data.draw(st.integers(start + 1, sum(documents)))
    counted = int(padded(one(stop - start), one(len(documents)), align)[0])
    assert counted % align == 0
    assert places(documents, start, stop, align) <= counted
    if len(documents) == 1:
        assert places(documents, start, stop, align) == counted


@settings(deadline=None)
@given(documents=DOCUMENTS, align=ALIGN, multiple=st.integers(1, 30))
def test_pieces_as_long_as_the_room_fit_a_pack(
    documents: list[int], align: int, multiple: int
) -> None:
    length = align * multiple
    size = int(room(length, one(len(documents)), align)[0])
    assert 1 <= size <= length
    for start in range(sum(documents)):
        assert places(documents, start, min(start + size, sum(documents)), align) <= length
    assert padded(one(size), one(len(documents)), align) <= length
    if len(documents) == 1 or align == 1:
        assert size == length


# ---- plans --------------------------------------------------------------------------------------

INDEX = SyntheticIndex(
    [
        SyntheticSource(name="text", num_samples=200, num_shards=2, docs=4),
        SyntheticSource(name="mixed", num_samples=90, num_shards=2, kind="mixed", salt=2, markup=2),
    ]
)


def aligned_plan(align: int, **changes: object) -> Plan:
    return make_plan(INDEX, align=align, lanes=2, window=80, **changes)


def test_alignment_is_part_of_the_digest_only_where_there_is_some() -> None:
    plain, same, aligned = aligned_plan(1), make_plan(INDEX, lanes=2, window=80), aligned_plan(8)
    assert plain.digest == same.digest
    assert plain.phase_digests == same.phase_digests
    assert aligned.digest != plain.digest
    assert aligned.phase_digests != plain.phase_digests


@pytest.mark.parametrize("packer", ["lbf", "balanced", "next_fit"])
def test_packs_are_nearly_as_full_with_alignment(packer: str) -> None:
    """Of places; the filler is no fill."""
    windows = list(windows_of(aligned_plan(16, packer=packer)))
    tokens = sum(int(window.tokens.sum()) for window in windows)
    taken = 0
    for window in windows:
        columns = [
            INDEX.columns(source, row[None]).documents[0]
            for source, row in zip(window.source.tolist(), window.row, strict=True)
        ]
        taken += int(padded(window.stop - window.start, np.array(columns), 16).sum())
    capacity = 2048 * sum(window.num_packs for window in windows)
    assert tokens < taken <= capacity
    assert taken > 0.8 * capacity


def test_filler_is_no_fill_of_a_simulation() -> None:
    plan, grid = aligned_plan(256), Grid(dp_size=2, micro_steps=2)
    pool = pool_of(plan.settings, INDEX, "lbf", grid, 3)
    steps = list(itertools.islice(steps_of(plan, grid), 3))
    assert pool.all("tokens").sum() == sum(int(step.tokens.sum()) for step in steps)
    assert pool.all("tokens").mean() < 0.95 * 2048


def test_a_phase_of_so_many_packs_counts_filler_with_its_samples() -> None:
    """Short texts aligned to 512 fill packs twice as fast as their tokens alone."""
    index = SyntheticIndex([SyntheticSource(name="text", num_samples=4000, salt=5)])
    ends = {}
    for align in (1, 1024):
        plan = make_plan(index, align=align, lanes=1, window=50, phases=(Phase(packs=200), Phase()))
        end = plan.streams[0].phases[0].end_window
        assert end is not None
        ends[align] = sum(plan.window(0, window).num_packs for window in range(end))
    assert 190 <= ends[1] <= 260
    assert 190 <= ends[1024] <= 260


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"align": 0}, "plan: align is 0; it must be at least 1"),
        ({"align": 100}, "plan: pack_length is 2048; it must be a multiple of plan.align, 100"),
        (
            {"align": 16, "phases": (Phase(windows=1, pack_length=1000), Phase())},
            r"phases\[0\]: pack_length is 1000; it must be a multiple of plan.align, 16",
        ),
    ],
)
def test_what_cannot_be_aligned_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(INDEX, **changes)
