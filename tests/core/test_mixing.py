from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dataservice.core.order.mixing import Mixture, build_mixture
from dataservice.core.order.shares import spread_rows
from dataservice.core.plan.windows import plan_window
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.errors import ConfigError
from tests.core.synthetic import SyntheticIndex, SyntheticSource

TEN_MILLION = SyntheticIndex(
    [
        SyntheticSource(name="text", num_samples=7_000_000, num_shards=70),
        SyntheticSource(
            name="pictures", num_samples=3_000_000, num_shards=30, kind="mixed", salt=1
        ),
    ]
)


def _index(*counts: int, **changes: Any) -> SyntheticIndex:
    return SyntheticIndex(
        [
            SyntheticSource(name=f"s{i}", num_samples=count, salt=i, **changes)
            for i, count in enumerate(counts)
        ]
    )


def _span(mixture: Mixture, source: int, lane: int, window: int) -> tuple[int, int]:
    """`source` counts among the mixture's."""
    return mixture.in_lane(mixture.phase_of(window), lane).spans(window)[source]


def _settings(sources: dict[str, str], **changes: Any) -> PlanSettings:
    kind = "repeat" if changes.get("epochs", 1) else "weight"
    shares = tuple(SourceShare(name=name, **{kind: text}) for name, text in sources.items())
    return PlanSettings(sources=shares, **changes)


def test_auto_at_ten_million_rows() -> None:
    mixture = build_mixture(_settings({"text": "1", "pictures": "1"}), TEN_MILLION)
    assert mixture.num_lanes == 32
    assert mixture.warnings == ()
    assert mixture.num_lanes * mixture.window_samples <= 10_000_000 / 4
    assert mixture.num_windows == -(-10_000_000 // (32 * mixture.window_samples))
    packs = plan_window(
        _settings({"text": "1", "pictures": "1"}), TEN_MILLION, mixture, 5, 100
    ).num_packs
    assert 200 <= packs <= 560


def test_the_mean_reads_a_bounded_number_of_rows() -> None:
    index = SyntheticIndex([SyntheticSource(name="text", num_samples=9_000_000)])
    build_mixture(_settings({"text": "1"}), index)
    assert index.rows_read == 8_192


def test_the_mean_is_of_runs_that_a_lazy_index_counts_at_once() -> None:
    rows = spread_rows(9_000_001, 8_192, run=64)
    assert len(set((rows // 64).tolist())) == 128
    assert rows[-1] < 9_000_001 and np.unique(rows).size == 8_192
    assert spread_rows(100, 8_192, run=64).tolist() == list(range(100))


def test_a_given_mean_is_taken_and_nothing_read() -> None:
    index = _index(20_000, 9_000)
    shares = tuple(
        SourceShare(name=f"s{i}", weight="1", mean_tokens=m) for i, m in enumerate((100, 300))
    )
    settings = PlanSettings(sources=shares, epochs=None, weight_by="tokens")
    mixture = build_mixture(settings, index)
    assert index.rows_read == 0
    assert [source.share for source in mixture.phases[0].sources] == [
        Fraction(3, 4),
        Fraction(1, 4),
    ]


@pytest.mark.parametrize(("weight_by", "most"), [("samples", 256), ("tokens", 5242)])
def test_the_means_of_many_sources_read_a_bounded_number_of_rows(weight_by: str, most: int) -> None:
    index = _index(*[20_000] * 200)
    weights = {f"s{i}": "1" for i in range(200)}
    build_mixture(_settings(weights, epochs=None, weight_by=weight_by), index)
    assert index.rows_read == 200 * most


def test_nothing_is_read_where_nothing_depends_on_lengths() -> None:
    index = _index(20_000, 300)
    mixture = build_mixture(_settings({"s0": "1"}, epochs=None), index)
    index.rows_read = 0
    size = {"lanes": mixture.num_lanes, "window": mixture.window_samples}
    again = build_mixture(_settings({"s0": "1"}, epochs=None, **size), index)
    assert again.phases[0].sources[0].share == 1
    assert again.warnings == ()
    assert index.rows_read == 8_192  # for the warnings alone


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 100, 1000, 20_000, 300_000])
def test_auto_at_any_size(count: int) -> None:
    mixture = build_mixture(_settings({"s0": "1"}), _index(count))
    lanes, window = mixture.num_lanes, mixture.window_samples
    assert window >= 1
    assert lanes & (lanes - 1) == 0
    assert lanes * window <= max(count / 4, 1)
    assert mixture.num_windows == -(-count // (lanes * window))


def test_auto_follows_what_is_set() -> None:
    lanes = build_mixture(_settings({"text": "1", "pictures": "1"}, lanes=12), TEN_MILLION)
    assert lanes.num_lanes == 12
    assert lanes.window_samples > 1000
    window = build_mixture(_settings({"text": "1", "pictures": "1"}, window=500_000), TEN_MILLION)
    assert (window.num_lanes, window.window_samples) == (4, 500_000)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lanes": 8, "window": 4096}, "32768 samples is more than a quarter of an epoch"),
        ({"window": 16}, "packs of 8192 tokens (1317 tokens a sample); packs fill badly"),
        ({"lanes": 200_000, "window": 1}, "lanes 200000 exceeds the 100000 samples"),
    ],
)
def test_unwise_settings_warn_with_numbers(changes: dict[str, int], match: str) -> None:
    warnings = build_mixture(_settings({"s0": "1"}, **changes), _index(100_000)).warnings
    assert any(match in warning for warning in warnings)


def test_weight_in_a_finite_run_warns() -> None:
    settings = PlanSettings(sources=(SourceShare(name="s0", weight="0.5"),))
    assert "weight of s0 is not used" in build_mixture(settings, _index(100)).warnings[0]


def test_endless_spans_follow_the_formula() -> None:
    settings = _settings({"s0": "0.3", "s1": "1/3"}, epochs=None, lanes=4, window=100)
    mixture = build_mixture(settings, _index(1001, 13))
    total = Fraction("0.3") + Fraction("1/3")
    for number, (source, weight) in enumerate(
        zip(mixture.phases[0].sources, ("0.3", "1/3"), strict=True)
    ):
        share = Fraction(weight) / total
        assert source.share == share
        for lane in range(4):
            size = (lane + 1) * source.order.num_samples // 4
            size -= lane * source.order.num_samples // 4
            rate = 4 * 100 * share * size / source.order.num_samples
            for window in (0, 1, 7, 12345):
                assert _span(mixture, number, lane, window) == (
                    window * rate // 1,
                    (window + 1) * rate // 1,
                )


def test_shares_by_tokens() -> None:
    index = SyntheticIndex(
        [
            SyntheticSource(name="short", num_samples=5000, scale=1),
            SyntheticSource(name="long", num_samples=5000, scale=4),
        ]
    )
    settings = _settings({"short": "1", "long": "3"}, epochs=None, weight_by="tokens")
    long, short = build_mixture(settings, index).phases[0].sources
    assert long.share / short.share == Fraction(3, 4)
    assert long.share + short.share == 1


@pytest.mark.parametrize("repeat", ["1", "2", "1/2", "0.3", "7/3"])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_finite_spans_tile_the_run(repeat: str, lanes: int) -> None:
    settings = _settings({"s0": repeat, "s1": "1"}, epochs=3, lanes=lanes, window=20)
    mixture = build_mixture(settings, _index(1000, 5))
    per_epoch = mixture.windows_per_epoch
    assert per_epoch is not None
    assert mixture.num_windows == 3 * per_epoch
    exact = Fraction(repeat)
    read = np.zeros(3)
    for lane in range(lanes):
        source = mixture.phases[0].sources[0]
        size = source.order.lane_size(lane)
        spans = [_span(mixture, 0, lane, w) for w in range(3 * per_epoch)]
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert all(first <= stop for first, stop in spans)
        assert spans[-1][1] - 3 * exact * size < 1
        for epoch in range(3):
            read[epoch] += spans[(epoch + 1) * per_epoch - 1][1] - spans[epoch * per_epoch][0]
    assert np.abs(read - float(1000 * exact)).max() <= (0 if exact.denominator == 1 else 2)


def test_a_source_smaller_than_the_lanes_keeps_its_share() -> None:
    settings = _settings({"s0": "1", "s1": "1/2"}, epochs=2, lanes=8, window=50)
    mixture = build_mixture(settings, _index(4000, 6))
    assert mixture.num_windows is not None
    read = sum(_span(mixture, 1, lane, mixture.num_windows - 1)[1] for lane in range(8))
    assert read == 6


@pytest.mark.parametrize(
    ("sources", "changes", "match"),
    [
        ({"absent": "1"}, {}, "'absent' is not in the index, which has s0, s1"),
        ({"s0": "0"}, {}, "no source has both a repeat above 0"),
        ({"s0": "-1"}, {}, "must not be negative"),
        ({"s0": "a third"}, {}, "repeat of 's0' is 'a third'"),
        ({"s0": "1/0"}, {"epochs": None}, "weight of 's0' is '1/0'"),
    ],
)
def test_wrong_sources(sources: dict[str, str], changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build_mixture(_settings(sources, **changes), _index(10, 10))


def test_missing_weight_and_double_name() -> None:
    lone = SourceShare(name="s0")
    with pytest.raises(ConfigError, match="weight of 's0' is missing"):
        build_mixture(PlanSettings(sources=(lone,), epochs=None), _index(10))
    with pytest.raises(ConfigError, match="'s0' is given twice"):
        build_mixture(PlanSettings(sources=(lone, lone)), _index(10))


def test_token_weights_need_tokens() -> None:
    settings = _settings({"s0": "1"}, epochs=None, weight_by="tokens")
    with pytest.raises(ConfigError, match="weighted by tokens"):
        build_mixture(settings, _index(10, scale=0))
