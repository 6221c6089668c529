"""`balanced`: never worse than `lbf` by its estimate, `lbf` without cost, even within rows."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.uncompiled import printed_by

from dataservice.core.cost import measure, sum_groups
from dataservice.core.packing import Packing, PackRules, pack
from dataservice.core.packing.goodput import ReferenceGrid, window_time
from dataservice.core.simulate import workloads

Ints = NDArray[np.int64]
MEGAPIXELS4 = 4 << 20


def _window(mix: str, count: int, *, seed: int = 0) -> tuple[Ints, Ints, Ints, Ints]:
    """(length, image tokens, patches, images) at 8,192 tokens and 4 megapixels."""
    columns = workloads.draw(mix, count, pack_length=8192, max_pixels=MEGAPIXELS4, seed=seed)
    found = measure(columns, rules=workloads.vision(MEGAPIXELS4))
    return found.length, found.image_tokens, found.num_patches, found.num_images


def _packed(window: tuple[Ints, ...], packer: Any, cost: Ints, **rules: Any) -> Packing:
    given_rules = PackRules(**{"packer": packer, "pack_length": 8192, **rules})
    length, tokens, patches, images = window
    return pack(length, tokens, patches, images, cost, given_rules, seed=4)


def _costs(packing: Packing, cost: Ints) -> Ints:
    return sum_groups(cost[packing.order], packing.offsets)


def _lockstep(cost: Ints, micro_steps: int) -> float:
    """Mean of the sorted rows' largest over the mean cost."""
    kept = np.sort(cost)[::-1][: len(cost) // micro_steps * micro_steps]
    return float(kept.reshape(micro_steps, -1).max(axis=1).mean() / kept.mean())


sample_lists = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 50)), min_size=1, max_size=120)


@settings(deadline=None, max_examples=120)
@given(
    samples=sample_lists,
    ranks=st.integers(1, 64),
    micro_steps=st.integers(1, 8),
    ratio=st.sampled_from(["0.2", "1", "20"]),
)
def test_never_longer_than_lbf_by_the_estimate(
    samples: list[tuple[int, int]], ranks: int, micro_steps: int, ratio: str
) -> None:
    length, cost = (np.array(values, dtype=np.int64) for values in zip(*samples, strict=True))
    window = (length, cost, cost, cost)
    rules = {
        "pack_length": 64,
        "llm_vit_ratio": ratio,
        "reference_ranks": ranks,
        "reference_micro_steps": micro_steps,
    }
    found = _packed(window, "balanced", cost, **rules)
    lbf = _packed(window, "lbf", cost, **rules)
    grid = ReferenceGrid(
        ranks=ranks, micro_steps=micro_steps, ratio=PackRules(packer="lbf", **rules).ratio
    )
    assert window_time(_costs(found, cost), grid) <= window_time(_costs(lbf, cost), grid)


@pytest.mark.parametrize("mix", ["text80", "mostlyvl"])
def test_without_cost_it_is_lbf(mix: str) -> None:
    window = _window(mix, 600)
    none = np.zeros(600, dtype=np.int64)

    def packs(packer: str) -> set[tuple[int, ...]]:
        found = _packed(window, packer, none)
        bounds = zip(found.offsets[:-1], found.offsets[1:], strict=True)
        return {tuple(found.order[a:b].tolist()) for a, b in bounds}

    assert packs("balanced") == packs("lbf")


@pytest.mark.parametrize(
    ("mix", "micro_steps", "least_fill", "most_waiting"),
    [("mostlyvl", 16, 0.996, 1.045), ("mostlyvl", 4, 0.996, 1.11), ("text80", 16, 0.987, 1.21)],
)
def test_packs_are_full_and_even_within_rows(
    mix: str, micro_steps: int, least_fill: float, most_waiting: float
) -> None:
    """Two windows' packs together, as a step holds those of many."""
    costs, tokens, packs = [], 0, 0
    for seed in range(2):
        window = _window(mix, 4096, seed=seed)
        found = _packed(
            window,
            "balanced",
            window[1],
            reference_ranks=4096 // micro_steps,
            reference_micro_steps=micro_steps,
        )
        costs.append(_costs(found, window[1]))
        tokens += int(window[0].sum())
        packs += found.num_packs
    assert tokens / (packs * 8192) >= least_fill
    assert _lockstep(np.concatenate(costs), micro_steps) <= most_waiting


def test_every_run_of_packs_has_its_share_of_each_cost() -> None:
    window = _window("mostlyvl", 4096)
    cost = _costs(_packed(window, "balanced", window[1]), window[1])
    high = cost >= np.sort(cost)[-len(cost) // 4]
    share = high.mean()
    for first in range(0, len(cost) - 64, 7):
        assert abs(high[first : first + 64].sum() - 64 * share) <= 4


def test_caps_lower_the_level_and_hold() -> None:
    window = _window("mostlyvl", 2000)
    cap = int(window[1].max())
    found = _packed(window, "balanced", window[1], image_token_cap=cap, image_cap=9)
    assert _costs(found, window[1]).max() <= cap
    assert _costs(found, window[3]).max() <= 9


def test_a_light_encoder_gets_the_fullest_packs() -> None:
    window = _window("mostlyvl", 4096)
    heavy, light = (
        _packed(window, "balanced", window[1], llm_vit_ratio=ratio) for ratio in ("1", "1000000")
    )
    assert light.num_packs == _packed(window, "lbf", window[1]).num_packs
    assert heavy.num_packs - light.num_packs <= 2


def fingerprint() -> str:
    seen = hashlib.sha256()
    for mix, micro_steps, cap in (("mostlyvl", 4, None), ("text80", 2, 5000)):
        window = _window(mix, 250)
        found = _packed(
            window,
            "balanced",
            window[2] * window[2],
            reference_ranks=512,
            reference_micro_steps=micro_steps,
            image_token_cap=cap,
        )
        assert _costs(found, window[1]).size
        seen.update(found.order.tobytes() + found.offsets.tobytes())
    return seen.hexdigest()


def test_same_with_the_compiler_off() -> None:
    code = "from tests.core.test_packing_balanced import fingerprint\nprint(fingerprint())"
    assert printed_by(code) == fingerprint()
