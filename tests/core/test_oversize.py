from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.plan import Plan
from dataservice.core.plan.oversize import Fitted, fit_samples
from dataservice.core.settings import Oversize
from dataservice.core.tables import REASONS, SampleColumns
from dataservice.core.tiles import tile_grid
from dataservice.core.vision import VisionRules, num_rows, planned_size, target_size
from tests.core.planning import counted, make_plan, windows_of
from tests.core.synthetic import SyntheticIndex, SyntheticSource

RULES = VisionRules(max_pixels=300 * 28 * 28)
POLICIES: tuple[Oversize, ...] = ("shrink", "truncate", "drop")

Sample = tuple[list[int], list[tuple[int, int]], int]
"""Text between the images (one more than images), (height, width) of them, markup of each."""


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(1, 4))
    text = st.lists(st.integers(0, 90), min_size=count + 1, max_size=count + 1)
    side = st.integers(14, 700)
    sizes = st.lists(st.tuples(side, side), min_size=count, max_size=count)
    return draw(text), draw(sizes), draw(st.integers(0, 3))


def columns_of(given: list[Sample], *, images_first: bool = False) -> SampleColumns:
    counts = [len(sizes) for _, sizes, _ in given]
    text = [sum(parts) + markup * len(sizes) for parts, sizes, markup in given]
    before = [
        sum(parts[: i + 1]) + markup * i
        for parts, sizes, markup in given
        for i in range(len(sizes))
    ]
    sizes = [size for _, sizes, _ in given for size in sizes]
    return SampleColumns(
        text_tokens=np.array(text, dtype=np.int64),
        loss_tokens=np.array(text, dtype=np.int64) // 2,
        image_offsets=np.cumsum([0, *counts]).astype(np.int64),
        height=np.array([high for high, _ in sizes], dtype=np.int64),
        width=np.array([wide for _, wide in sizes], dtype=np.int64),
        text_before=None if images_first else np.array(before, dtype=np.int64),
        markup=None
        if images_first
        else np.array([m for _, sizes, m in given for _ in sizes], dtype=np.int64),
    )


def tokens_of(size: tuple[int, int], max_pixels: int, rules: VisionRules = RULES) -> int:
    high, wide = target_size(
        *size,
        patch=rules.patch,
        merge=rules.merge,
        min_pixels=rules.min_pixels,
        max_pixels=max_pixels,
    )
    return (high // 28) * (wide // 28)


def length_of(sample: Sample, max_pixels: int) -> int:
    parts, sizes, markup = sample
    return sum(parts) + sum(tokens_of(size, max_pixels) + markup for size in sizes)


def fit(given: list[Sample], policy: Oversize, pack_length: int) -> Fitted:
    return fit_columns(columns_of(given), RULES, policy, pack_length)


def fit_columns(
    columns: SampleColumns, rules: VisionRules, policy: Oversize, pack_length: int
) -> Fitted:
    room = np.full(len(columns.text_tokens), pack_length, dtype=np.int64)
    return fit_samples(columns, rules=rules, room=room, policy=policy)


@settings(deadline=None, max_examples=40)
@given(given=st.lists(samples(), min_size=1, max_size=5), pack_length=st.integers(20, 500))
def test_shrink_keeps_every_image_and_all_text(given: list[Sample], pack_length: int) -> None:
    long = [s for s in given if length_of(s, RULES.max_pixels) > pack_length]
    fitted = fit(long, "shrink", pack_length)
    for i, sample in enumerate(long):
        stop, most = int(fitted.stop[i]), int(fitted.image_limit[i])
        if stop == 0:
            assert length_of(sample, RULES.min_pixels) > pack_length
            assert fitted.kept_images[i] == fitted.image_tokens[i] == fitted.num_patches[i] == 0
            continue
        assert stop == length_of(sample, most) == fitted.total_tokens[i] <= pack_length
        assert RULES.min_pixels <= most < RULES.max_pixels
        assert fitted.kept_images[i] == len(sample[1])
        patches = [4 * tokens_of(size, most) for size in sample[1]]
        assert fitted.image_tokens[i] == sum(patches) // 4
        assert fitted.num_patches[i] == sum(patches)
        assert fitted.patches_squared[i] == sum(p * p for p in patches)
        # A 1/256 more does not fit.
        more = range(most + 1, most + max(most >> 8, 1) + 1)
        assert any(length_of(sample, pixels) > pack_length for pixels in more)


@settings(deadline=None, max_examples=60)
@given(given=st.lists(samples(), min_size=1, max_size=5), pack_length=st.integers(1, 400))
def test_truncate_cuts_text_or_before_an_image(given: list[Sample], pack_length: int) -> None:
    """Against the sample written out token by token; 0 is text, i the i-th image and its markup."""
    long = [s for s in given if length_of(s, RULES.max_pixels) > pack_length]
    fitted = fit(long, "truncate", pack_length)
    for i, (parts, sizes, markup) in enumerate(long):
        written = [0] * parts[0]
        for number, (size, part) in enumerate(zip(sizes, parts[1:], strict=True), start=1):
            written += [number] * (tokens_of(size, RULES.max_pixels) + markup) + [0] * part
        stop = pack_length
        if written[stop] and written[stop] == written[stop - 1]:
            stop = written.index(written[stop])
        whole = {n for n in written[:stop] if n}
        assert fitted.stop[i] == stop
        assert fitted.kept_images[i] == len(whole)
        assert fitted.total_tokens[i] == len(written)
        patches = [4 * tokens_of(sizes[n - 1], RULES.max_pixels) for n in whole]
        assert fitted.image_tokens[i] == sum(patches) // 4
        assert fitted.patches_squared[i] == sum(p * p for p in patches)
        assert fitted.image_limit[i] == RULES.max_pixels


def test_every_place_of_a_cut() -> None:
    """5 text tokens, an image of 4 + 2, another of 6 + 2, 3 text tokens; markup is never cut."""
    sample: Sample = ([5, 0, 3], [(56, 56), (56, 84)], 2)
    stops = [5] * 6 + [11] * 8 + [19]
    found = [fit([sample], "truncate", length) for length in range(5, 22)]
    assert [int(f.stop[0]) for f in found] == [*stops, 20, 21]
    assert [int(f.kept_images[0]) for f in found] == [0] * 6 + [1] * 8 + [2] * 3


def test_without_places_images_stand_first() -> None:
    sample: Sample = ([0, 0, 50], [(280, 280), (280, 280)], 0)
    columns = columns_of([sample], images_first=True)
    cut = {
        length: fit_columns(columns, RULES, "truncate", length)
        for length in (99, 100, 150, 200, 249)
    }
    assert [(int(f.stop[0]), int(f.kept_images[0])) for f in cut.values()] == [
        (0, 0),
        (100, 1),
        (100, 1),
        (200, 2),
        (249, 2),
    ]


def test_drop_leaves_all_out() -> None:
    fitted = fit([([9, 9], [(280, 280)], 2)] * 3, "drop", 50)
    assert fitted.stop.tolist() == fitted.kept_images.tolist() == [0, 0, 0]
    assert fitted.total_tokens.tolist() == [120] * 3


def test_max_pixels_below_one_image_token() -> None:
    """Nothing is left to shrink: the sample is dropped, not looked for for ever."""
    rules = VisionRules(min_pixels=1, max_pixels=400)
    columns = columns_of([([9, 9], [(280, 280)], 0)])
    fitted = fit_columns(columns, rules, "shrink", 10)
    assert fitted.stop.tolist() == [0]


# ---- in windows ---------------------------------------------------------------------------------

INDEX = SyntheticIndex(
    [
        SyntheticSource(name="text", num_samples=150, num_shards=2),
        SyntheticSource(name="caption", num_samples=120, num_shards=2, kind="caption", salt=1),
        SyntheticSource(name="mixed", num_samples=90, num_shards=2, kind="mixed", salt=2, markup=2),
        SyntheticSource(name="empty", num_samples=5, scale=0, salt=3),
    ]
)


def _policy_plan(policy: Oversize, **changes: Any) -> Plan:
    return make_plan(INDEX, pack_length=1200, lanes=2, window=60, oversize=policy, **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_windows_read_is_packed_or_counted(policy: Oversize) -> None:
    plan = _policy_plan(policy)
    packed: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for window in windows_of(plan):
        assert (window.tokens <= 1200).all()
        for source, row, *item in zip(
            window.source.tolist(),
            window.row.tolist(),
            window.start.tolist(),
            window.stop.tolist(),
            window.total_tokens.tolist(),
            window.kept_images.tolist(),
            window.image_limit.tolist(),
            strict=True,
        ):
            packed.setdefault((source, row), []).append(tuple(item))
    counts = {reason: counted(plan, reason).tolist() for reason in REASONS}
    sizes = [150, 120, 90, 5]
    for source, size in enumerate(sizes):
        items = {row: found for (of, row), found in packed.items() if of == source}
        left_out = counts["dropped_long"][source] + counts["rejected"][source]
        assert len(items) + left_out == size
        columns = INDEX.columns(source, np.array(sorted(items), dtype=np.int64))
        images = np.diff(columns.image_offsets)
        seen = dict.fromkeys(REASONS, 0)
        for number, row in enumerate(sorted(items)):
            pieces, text = sorted(items[row]), int(columns.text_tokens[number])
            (_, stop, total, kept, pixels), *_ = pieces
            if images[number] == 0:
                edges = [*range(0, total, 1200), total]
                assert [piece[:2] for piece in pieces] == list(itertools.pairwise(edges))
                seen["split"] += len(pieces) > 1
                continue
            assert len(pieces) == 1
            own = RULES_OF_PLAN.max_pixels
            seen["shrunk"] += pixels < own
            seen["images_cut"] += kept < images[number]
            seen["truncated"] += stop < total and kept == images[number]
            if policy != "truncate":
                assert (stop, kept) == (total, images[number])
            if pixels < own:
                assert text < total <= 1200
        for reason in ("split", "shrunk", "images_cut", "truncated"):
            assert seen[reason] == counts[reason][source], (reason, source)
    assert counts["split"][0] > 0
    assert counts["rejected"] == [0, 0, 0, 5]
    expected = {
        "shrink": {"shrunk"},
        "truncate": {"truncated", "images_cut"},
        "drop": set(),
    }[policy]
    for reason in ("shrunk", "truncated", "images_cut"):
        assert (sum(counts[reason]) > 0) == (reason in expected)


RULES_OF_PLAN = VisionRules()


@pytest.mark.parametrize("policy", POLICIES)
def test_packs_hold_what_their_items_hold(policy: Oversize) -> None:
    plan = _policy_plan(policy)
    for window in windows_of(plan):
        for k in range(window.num_packs):
            tokens = image_tokens = images = patches = 0
            for i in range(*window.item_offsets[k : k + 2].tolist()):
                row = np.array([window.row[i]])
                columns = INDEX.columns(int(window.source[i]), row)
                kept = int(window.kept_images[i])
                found = [
                    tokens_of((int(h), int(w)), int(window.image_limit[i]), RULES_OF_PLAN)
                    for h, w in zip(columns.height[:kept], columns.width[:kept], strict=True)
                ]
                tokens += int(window.stop[i] - window.start[i])
                image_tokens += sum(found)
                patches += 4 * sum(found)
                images += kept
            assert (window.tokens[k], window.image_tokens[k]) == (tokens, image_tokens)
            assert (window.num_images[k], window.num_patches[k]) == (images, patches)


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_tokens_of_what_is_left(policy: Oversize) -> None:
    """A truncated sample's are its share of the text that is left."""
    plan = _policy_plan(policy)
    total = sum(int(window.loss_tokens.sum()) for window in windows_of(plan))
    expected = 0
    for window in windows_of(plan):
        for i in range(len(window.row)):
            columns = INDEX.columns(int(window.source[i]), np.array([window.row[i]]))
            loss, text = int(columns.loss_tokens[0]), int(columns.text_tokens[0])
            start, stop, whole = (
                int(v[i]) for v in (window.start, window.stop, window.total_tokens)
            )
            if window.kept_images[i] == 0 and len(columns.width) == 0:
                share = loss * stop // whole - loss * start // whole
                expected += share - (start > 0 and share > 0)
                continue
            kept = int(window.kept_images[i])
            images = sum(
                tokens_of((int(h), int(w)), int(window.image_limit[i]), RULES_OF_PLAN)
                for h, w in zip(columns.height[:kept], columns.width[:kept], strict=True)
            )
            expected += loss * (stop - images) // text if stop < whole else loss
    assert total == expected


# ---- tiles --------------------------------------------------------------------------------------

TILES = VisionRules(mode="tiles", tile=28, tile_tokens=7, min_tiles=2, max_tiles=9)


def tiles_of(size: tuple[int, int], most: int) -> int:
    """With the thumbnail."""
    rows, columns = tile_grid(*size, tile=28, min_tiles=2, max_tiles=most)
    return rows * columns + 1


@settings(deadline=None, max_examples=40)
@given(given=st.lists(samples(), min_size=1, max_size=5), pack_length=st.integers(20, 500))
def test_shrink_takes_tiles_away(given: list[Sample], pack_length: int) -> None:
    def length(sample: Sample, most: int) -> int:
        parts, sizes, markup = sample
        return sum(parts) + sum(7 * tiles_of(size, most) + markup for size in sizes)

    long = [sample for sample in given if length(sample, 9) > pack_length]
    fitted = fit_columns(columns_of(long), TILES, "shrink", pack_length)
    for i, sample in enumerate(long):
        stop, most = int(fitted.stop[i]), int(fitted.image_limit[i])
        if stop == 0:
            assert length(sample, 2) > pack_length
            continue
        assert stop == length(sample, most) <= pack_length < length(sample, most + 1)
        assert 2 <= most < 9
        tiles = sum(tiles_of(size, most) for size in sample[1])
        assert fitted.image_tokens[i] == 7 * tiles
        assert fitted.num_patches[i] == 4 * tiles
        assert fitted.patches_squared[i] == 16 * tiles


@settings(deadline=None, max_examples=30)
@given(given=st.lists(samples(), min_size=1, max_size=5), pack_length=st.integers(1, 400))
def test_truncate_keeps_whole_images_of_tiles(given: list[Sample], pack_length: int) -> None:
    fitted = fit_columns(columns_of(given), TILES, "truncate", pack_length)
    for i, (_, sizes, _) in enumerate(given):
        tiles = [tiles_of(size, 9) for size in sizes]
        kept = int(fitted.kept_images[i])
        assert fitted.image_tokens[i] == 7 * sum(tiles[:kept])
        assert fitted.image_limit[i] == 9


def test_windows_of_tiles_hold_what_their_items_hold() -> None:
    rules = VisionRules(mode="tiles", max_tiles=6)
    plan = _policy_plan("shrink", vision=rules)
    assert counted(plan, "shrunk").sum() > 0
    for window in windows_of(plan):
        assert (window.tokens <= 1200).all()
        assert (window.num_patches == 4 * window.image_tokens).all()
        for k in range(window.num_packs):
            tiles = 0
            for i in range(*window.item_offsets[k : k + 2].tolist()):
                columns = INDEX.columns(int(window.source[i]), np.array([window.row[i]]))
                for size in zip(columns.height.tolist(), columns.width.tolist(), strict=True):
                    high, wide = planned_size(*size, rules, int(window.image_limit[i]))
                    tiles += num_rows(high, wide, rules)
            assert window.image_tokens[k] == 256 * tiles
