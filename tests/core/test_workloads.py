from __future__ import annotations

import bisect
import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.cost import measure, sum_groups
from dataservice.core.packing import PackRules, pack
from dataservice.core.simulate.mixes import MEGAPIXEL, MIXES
from dataservice.core.simulate.workloads import (
    Generator,
    SyntheticIndex,
    correlated,
    draw,
    vision,
)
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import planned_sizes, target_size
from dataservice.errors import ConfigError

Ints = NDArray[np.int64]

P_REF = 4096

MOMENTS = {
    ("text80", 8192, 4): (
        (1464, 771, 5565, 8192, 0.111, 0.196, 1.32),
        (1444, 5120, 16168),
        (912, 1.368, 7.9, 2.02, 13.3),
    ),
    ("text80", 32768, 16): (
        (1587, 771, 5841, 11719, 0.118, 0.196, 1.32),
        (1444, 5120, 30096),
        (3884, 0.881, 7.0, 2.02, 24.6),
    ),
    ("mostlyvl", 8192, 4): (
        (1361, 823, 4453, 6387, 0.572, 0.907, 1.37),
        (1344, 5160, 16188),
        (4691, 0.340, 1.70, 0.632, 2.85),
    ),
    ("mostlyvl", 32768, 4): (
        (1376, 823, 4453, 6387, 0.566, 0.907, 1.37),
        (1344, 5160, 16188),
        (18548, 0.199, 1.53, 0.355, 2.71),
    ),
}
"""(mix, tokens, megapixels): of samples length mean, p50, p95, p99, image-token share, share with
images, images each; of images patches p50, p90, p99; of packs image tokens mean, CV, max / mean,
vit_cost CV, max / mean."""


def _of_images(columns: SampleColumns, max_pixels: int) -> tuple[Ints, Ints]:
    """(patches, tokens) of each image."""
    height, width = planned_sizes(columns.height, columns.width, vision(max_pixels))
    patches = (height // 16) * (width // 16)
    return patches, patches // 4


def _length(columns: SampleColumns, max_pixels: int) -> Ints:
    _, tokens = _of_images(columns, max_pixels)
    return columns.text_tokens + sum_groups(tokens, columns.image_offsets)


def _same(one: SampleColumns, other: SampleColumns) -> bool:
    names = ("text_tokens", "loss_tokens", "image_offsets", "width", "height")
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)


def _buffered_lbf(length: list[int], capacity: int) -> list[list[int]]:
    """Length-bucketed fill over a buffer of the next 1,024 samples, in which the moments of packs
    were measured. The packer's closed windows start with like lengths together."""
    waiting: dict[int, deque[int]] = {}
    lengths: list[int] = []  # of the waiting samples, rising
    coming = iter(enumerate(length))
    taken = bytearray(len(length))
    packs: list[list[int]] = []

    def feed(count: int) -> None:
        for sample, size in itertools.islice(coming, count):
            if size not in waiting:
                waiting[size] = deque()
                bisect.insort(lengths, size)
            waiting[size].append(sample)

    def next_size(room: int) -> int:
        place = bisect.bisect_right(lengths, room) - 1
        if place < 0:
            return 0
        if lengths[place] == room:
            return room
        for size in reversed(lengths[max(place - 63, 0) : place + 1]):
            if 2 * size < room:
                break
            if len(waiting.get(room - size, ())) >= (2 if 2 * size == room else 1):
                return size
        return lengths[place]

    feed(1024)
    oldest = 0
    while lengths:
        while taken[oldest]:
            oldest += 1
        size, room, held = length[oldest], capacity, []
        while size:
            sample = waiting[size].popleft()
            if not waiting[size]:
                del waiting[size], lengths[bisect.bisect_left(lengths, size)]
            taken[sample] = 1
            held.append(sample)
            room -= size
            feed(1)
            size = next_size(room)
        packs.append(held)
    return packs


@pytest.mark.parametrize("row", MOMENTS, ids=lambda row: "-".join(map(str, row)))
def test_moments_of_100_000_shuffled_samples_are_within_2_percent(
    row: tuple[str, int, int],
) -> None:
    mix, pack_length, megapixels = row
    max_pixels = megapixels * MEGAPIXEL
    columns = draw(mix, 100_000, pack_length=pack_length, max_pixels=max_pixels)
    patches, tokens = _of_images(columns, max_pixels)
    offsets = columns.image_offsets
    images = np.diff(offsets)
    image_tokens = sum_groups(tokens, offsets)
    length = columns.text_tokens + image_tokens
    cost = sum_groups(patches * (P_REF + patches), offsets)
    packs = _buffered_lbf(length.tolist(), pack_length)
    order = np.concatenate(packs)
    pack_offsets = np.cumsum([0, *map(len, packs)])
    in_packs = sum_groups(image_tokens[order], pack_offsets)
    costs = sum_groups(cost[order], pack_offsets)

    samples_want, images_want, packs_want = MOMENTS[row]
    with_images = int((images > 0).sum())
    found_samples = (
        length.mean(),
        *np.percentile(length, (50, 95, 99)),
        image_tokens.sum() / length.sum(),
        with_images / len(length),
        images.sum() / with_images,
    )
    found_packs = (
        in_packs.mean(),
        in_packs.std() / in_packs.mean(),
        in_packs.max() / in_packs.mean(),
        costs.std() / costs.mean(),
        costs.max() / costs.mean(),
    )
    assert sorted(order.tolist()) == list(range(100_000))
    assert found_samples == pytest.approx(samples_want, rel=0.02)
    assert tuple(np.percentile(patches, (50, 90, 99))) == pytest.approx(images_want, rel=0.02)
    assert found_packs == pytest.approx(packs_want, rel=0.02)


@pytest.mark.parametrize("mix", ["text80", "mostlyvl"])
def test_closed_windows_of_the_packer_have_these_moments_too_at_8k(mix: str) -> None:
    max_pixels = 4 * MEGAPIXEL
    samples = measure(
        draw(mix, 98_304, pack_length=8192, max_pixels=max_pixels), rules=vision(max_pixels)
    )
    cost = P_REF * samples.num_patches + samples.patches_squared
    columns = (samples.length, samples.image_tokens, samples.num_patches, samples.num_images, cost)
    images, costs = [], []
    for first in range(0, 98_304, 4096):
        window = [column[first : first + 4096] for column in columns]
        packing = pack(*window, PackRules(packer="lbf", pack_length=8192))
        images.append(sum_groups(window[1][packing.order], packing.offsets))
        costs.append(sum_groups(window[4][packing.order], packing.offsets))
    _, _, (mean, spread, _, cost_spread, _) = MOMENTS[mix, 8192, 4]
    in_packs, of_packs = np.concatenate(images), np.concatenate(costs)
    assert in_packs.mean() == pytest.approx(mean, rel=0.02)
    assert in_packs.std() / in_packs.mean() == pytest.approx(spread, rel=0.06)
    assert of_packs.std() / of_packs.mean() == pytest.approx(cost_spread, rel=0.06)


def test_gravity_has_the_properties_its_report_states() -> None:
    mix = MIXES["gravity"]
    assert (mix.pack_length, mix.max_pixels) == (32_768, 16 * MEGAPIXEL)
    columns = draw("gravity", 400_000, pack_length=mix.pack_length, max_pixels=mix.max_pixels)
    length = _length(columns, mix.max_pixels)
    text_only = np.diff(columns.image_offsets) == 0
    assert length[text_only].sum() / length.sum() == pytest.approx(0.8, abs=0.004)

    megapixels = columns.width * columns.height / MEGAPIXEL
    assert (megapixels <= 2).mean() == pytest.approx(0.9, abs=0.002)
    assert 12 < megapixels.max() <= 16


@pytest.mark.parametrize("mix", MIXES)
def test_a_row_is_the_same_whatever_it_is_asked_for_with(mix: str) -> None:
    index = SyntheticIndex(mix, num_samples=10**10, pack_length=8192, max_pixels=MEGAPIXEL)
    for source in range(0, len(index.sources), 7):
        rows = np.array([0, 10**7, 5, 5, 40_000_017, 3], dtype=np.int64)
        together = index.columns(source, rows)
        offsets = together.image_offsets
        for i, row in enumerate(rows):
            alone = index.columns(source, np.array([row]))
            here = slice(offsets[i], offsets[i + 1])
            assert alone.text_tokens[0] == together.text_tokens[i]
            assert alone.width.tolist() == together.width[here].tolist()
            assert alone.height.tolist() == together.height[here].tolist()


def test_the_seed_changes_samples_and_the_number_of_them_does_not() -> None:
    def columns(num_samples: int, seed: int) -> SampleColumns:
        index = SyntheticIndex(
            "mostlyvl", num_samples=num_samples, pack_length=8192, max_pixels=MEGAPIXEL, seed=seed
        )
        return index.columns(30, np.arange(100))

    assert _same(columns(100_000, 0), columns(10**9, 0))
    assert not _same(columns(100_000, 0), columns(100_000, 1))


@settings(deadline=None, max_examples=30)
@given(
    mix=st.sampled_from(sorted(MIXES)),
    pack_length=st.sampled_from([64, 500, 2048, 8192, 32_768]),
    max_pixels=st.sampled_from([100_000, MEGAPIXEL, 4 * MEGAPIXEL, 16 * MEGAPIXEL]),
    seed=st.integers(0, 1000),
)
def test_every_sample_fits_its_pack(mix: str, pack_length: int, max_pixels: int, seed: int) -> None:
    columns = draw(mix, 3000, pack_length=pack_length, max_pixels=max_pixels, seed=seed)
    length = _length(columns, max_pixels)
    assert 1 <= length.min() and length.max() <= pack_length
    assert columns.image_offsets[-1] == len(columns.width) == len(columns.height)
    assert columns.loss_tokens.min() >= 0 and (columns.loss_tokens <= columns.text_tokens).all()


@pytest.mark.parametrize(("pack_length", "max_pixels"), [(1024, 4 * MEGAPIXEL), (1500, MEGAPIXEL)])
def test_cutting_is_as_its_rule_says_sample_by_sample(pack_length: int, max_pixels: int) -> None:
    """An image above the pack shrinks, then whole images go from the end, then text."""
    whole = draw("mostlyvl", 2000, pack_length=10**7, max_pixels=max_pixels)
    cut = draw("mostlyvl", 2000, pack_length=pack_length, max_pixels=max_pixels)
    rules = vision(min(max_pixels, pack_length * 1024))
    dropped = shrunk = shortened = 0
    for i in range(2000):
        first, last = whole.image_offsets[i : i + 2]
        room, kept = pack_length, 0
        for high, wide in zip(whole.height[first:last], whole.width[first:last], strict=True):
            new_high, new_wide = target_size(
                int(high),
                int(wide),
                patch=16,
                merge=2,
                min_pixels=rules.min_pixels,
                max_pixels=rules.max_pixels,
            )
            tokens = new_high * new_wide // 1024
            if tokens > room:
                break
            room, kept = room - tokens, kept + 1
            at = cut.image_offsets[i] + kept - 1
            if (cut.height[at], cut.width[at]) != (high, wide):
                assert (cut.height[at], cut.width[at]) == (new_high, new_wide)
                shrunk += 1
        assert cut.image_offsets[i + 1] - cut.image_offsets[i] == kept
        assert cut.text_tokens[i] == min(whole.text_tokens[i], room)
        dropped += last - first - kept
        shortened += cut.text_tokens[i] < whole.text_tokens[i]
    assert dropped > 0 and shortened > 0
    assert (shrunk > 0) == (max_pixels > pack_length * 1024)


@pytest.mark.parametrize("mix", MIXES)
def test_an_index_has_the_mixs_sources_shares_and_text_only_samples(mix: str) -> None:
    num_samples = 300_007
    index = SyntheticIndex(mix, num_samples=num_samples, pack_length=8192, max_pixels=MEGAPIXEL)
    parts = MIXES[mix].parts
    assert len(index.sources) == sum(part.sources for part in parts) == 120
    assert sum(sum(stats.shard_samples) for stats in index.sources) == num_samples
    total = sum(part.share for part in parts)
    for part in parts:
        own = [s for s in index.sources if s.name.rpartition("-")[0] == part.name]
        size = sum(sum(stats.shard_samples) for stats in own)
        assert size / num_samples == pytest.approx(part.share / total, abs=1e-4)
    for number, stats in enumerate(index.sources):
        rows = np.arange(sum(stats.shard_samples))
        text_only = np.diff(index.columns(number, rows).image_offsets) == 0
        shards = np.split(text_only, np.cumsum(stats.shard_samples)[:-1])
        assert [int(shard.sum()) for shard in shards] == list(stats.shard_text_samples)
        for kind, chosen in (("text", text_only), ("vision", ~text_only)):
            numbers = np.arange(int(chosen.sum()))
            if numbers.size:
                found = index.rows_of_kind(number, kind, numbers)
                assert found.tolist() == np.flatnonzero(chosen).tolist()


def test_a_rank_reads_whole_shards_of_one_source_each() -> None:
    shard_samples, ranks = 50, 4
    settings = {"pack_length": 8192, "max_pixels": MEGAPIXEL, "shard_samples": shard_samples}
    apart = [correlated("text80", r, ranks, 300, 1, **settings) for r in range(ranks)]
    assert not any(_same(a, b) for a, b in itertools.combinations(apart, 2))
    together = correlated("text80", 1, ranks, 300, 3, **settings)
    by_shard = together.text_tokens.reshape(2, shard_samples, 3).swapaxes(1, 2).reshape(-1)
    assert by_shard.tolist() == apart[1].text_tokens.tolist()

    mix = MIXES["text80"]
    generator = Generator(
        mix.parts, key="text80", pack_length=8192, max_pixels=MEGAPIXEL, seed=mix.first_seed
    )
    for shard, text in zip(
        (1, 5, 9), apart[1].text_tokens.reshape(-1, shard_samples)[:3], strict=True
    ):
        rows = shard * shard_samples + np.arange(shard_samples)
        of_source = [generator.columns(s, rows).text_tokens for s in range(120)]
        assert sum(np.array_equal(text, other) for other in of_source) == 1


def test_a_mix_that_is_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'textual'.*text80, mostlyvl, gravity"):
        draw("textual", 10, pack_length=8192, max_pixels=MEGAPIXEL)
    with pytest.raises(ConfigError, match="num_samples is 0"):
        SyntheticIndex("text80", num_samples=0, pack_length=8192, max_pixels=MEGAPIXEL)
