from __future__ import annotations

from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.packing import Packing, PackRules, pack
from dataservice.core.settings import Packer

PACKERS: tuple[Packer, ...] = get_args(Packer)
Ints = NDArray[np.int64]


def _workload(count: int, seed: int, capacity: int = 8192) -> tuple[Ints, Ints]:
    rng = np.random.Generator(np.random.Philox(seed))
    length = np.clip(np.exp(rng.normal(6.7, 1.0, count)), 1, capacity).astype(np.int64)
    images = np.where(rng.random(count) < 0.3, np.minimum(length, rng.integers(1, 3000, count)), 0)
    return length, images


def packed(length: Any, images: Any, *, seed: int = 0, **rules: Any) -> Packing:
    """Image tokens are the cost, too; four patches each, one image a sample that has any."""
    tokens = np.asarray(images)
    return pack(
        length,
        tokens,
        tokens * 4,
        (tokens > 0).astype(np.int64),
        tokens,
        PackRules(**{"pack_length": 8192, **rules}),
        seed=seed,
    )


def _sums(packing: Packing, values: Ints) -> Ints:
    return np.add.reduceat(values[packing.order], packing.offsets[:-1])


def _fill(packing: Packing, length: Ints, capacity: int = 8192) -> float:
    return float(length.sum() / (packing.num_packs * capacity))


def _packs(packing: Packing) -> list[tuple[int, ...]]:
    bounds = zip(packing.offsets[:-1], packing.offsets[1:], strict=True)
    return [tuple(packing.order[a:b].tolist()) for a, b in bounds]


samples = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5), st.integers(0, 90)),
    max_size=80,
)
caps = st.none() | st.integers(1, 70)


@pytest.mark.parametrize("packer", PACKERS)
@settings(deadline=None, max_examples=50)
@given(
    samples=samples,
    token_cap=caps,
    patch_cap=caps,
    image_cap=caps,
    open_bins=st.integers(1, 5),
    ranks=st.integers(1, 200),
)
def test_every_sample_once_within_room_and_caps(
    packer: Packer,
    samples: list[tuple[int, int, int, int]],
    token_cap: int | None,
    patch_cap: int | None,
    image_cap: int | None,
    open_bins: int,
    ranks: int,
) -> None:
    columns = np.array(samples, dtype=np.int64).reshape(-1, 4)
    length, images, cost = columns[:, 0], columns[:, 2], columns[:, 3]
    tokens = np.minimum(length, columns[:, 1]) * (images > 0)
    rules = PackRules(
        packer=packer,
        pack_length=60,
        open_bins=open_bins,
        image_token_cap=token_cap,
        patch_cap=patch_cap,
        image_cap=image_cap,
        reference_ranks=ranks,
        reference_micro_steps=2,
    )
    packing = pack(length, tokens, tokens * 2, images, cost, rules, seed=3)
    assert sorted(packing.order.tolist()) == list(range(len(samples)))
    assert packing.offsets[0] == 0
    assert packing.offsets[-1] == len(samples)
    assert (np.diff(packing.offsets) > 0).all()
    for members in map(list, _packs(packing)):
        assert length[members].sum() <= 60
        for use, cap in ((tokens, token_cap), (tokens * 2, patch_cap), (images, image_cap)):
            if cap is not None and use[members].sum() > cap:
                assert (use[members] > 0).sum() == 1
    again = pack(length, tokens, tokens * 2, images, cost, rules, seed=3)
    assert packing.order.tobytes() == again.order.tobytes()
    assert packing.offsets.tobytes() == again.offsets.tobytes()


@pytest.mark.parametrize(
    ("packer", "least", "most"),
    [("next_fit", 0.8, 0.9), ("best_fit", 0.99, 1), ("nbin", 0.93, 0.99), ("budget_2d", 0.8, 0.92)],
)
def test_fill_of_the_baselines(packer: str, least: float, most: float) -> None:
    length, images = _workload(4096, 1)
    assert least <= _fill(packed(length, images, packer=packer), length) <= most


@pytest.mark.parametrize("seed", range(4))
def test_fill_of_lbf(seed: int) -> None:
    length, images = _workload(4096, seed)
    assert _fill(packed(length, images, packer="lbf"), length) >= 0.999


def test_lbf_stays_full_under_an_image_cap() -> None:
    length, images = _workload(4096, 5)
    packing = packed(length, images, packer="lbf", image_token_cap=3000)
    assert _sums(packing, images).max() <= 3000
    assert _fill(packing, length) >= 0.995


def test_lbf_by_hand() -> None:
    """Oldest first (6), then 3 and 1 fill the 4 that are left; 8 and 2 pair up."""
    length = np.array([6, 3, 2, 1, 9, 8])
    packing = packed(length, length * 0, pack_length=10, packer="lbf")
    assert set(_packs(packing)) == {(0, 1, 3), (2, 5), (4,)}


def test_nbin_by_hand() -> None:
    """Images to the lighter bin, text to the emptier; the fullest leaves when nothing fits."""
    length = np.array([5, 4, 3, 2, 4])
    images = np.array([2, 4, 3, 0, 0])
    packing = packed(length, images, pack_length=10, packer="nbin", open_bins=2)
    assert {tuple(sorted(members)) for members in _packs(packing)} == {(0, 2), (1, 3, 4)}
    wider = packed([*length, 6], [*images, 0], pack_length=10, packer="nbin", open_bins=2)
    assert {tuple(sorted(members)) for members in _packs(wider)} == {(0, 2), (1, 3, 4), (5,)}


def test_budget_2d_gives_a_sample_above_the_budget_a_pack_to_itself() -> None:
    length = np.array([4, 4, 2, 2, 4, 4])
    images = np.array([4, 0, 0, 0, 0, 0])
    packing = packed(length, images, pack_length=10, packer="budget_2d", open_bins=2)
    assert (0,) in _packs(packing)


@pytest.mark.parametrize("packer", PACKERS)
def test_more_open_bins_or_a_seed_change_no_set_of_samples(packer: str) -> None:
    length, images = _workload(300, 2)
    first, second = (_packs(packed(length, images, packer=packer, seed=seed)) for seed in (1, 2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_lbf_does_not_leave_the_emptiest_packs_to_the_end() -> None:
    length, images = _workload(2000, 3)
    packing = packed(length, images, packer="lbf")
    emptiest = np.argsort(_sums(packing, length))[:4]
    assert emptiest.min() < packing.num_packs * 3 // 4


@pytest.mark.parametrize("packer", PACKERS)
def test_nothing_to_pack(packer: str) -> None:
    packing = packed([], np.zeros(0, dtype=np.int64), packer=packer)
    assert packing.num_packs == 0
    assert packing.order.shape == (0,)


@pytest.mark.parametrize("packer", PACKERS)
def test_single_sample_above_the_cap_ends(packer: str) -> None:
    packing = packed([5, 5, 3], [5, 5, 0], pack_length=8, packer=packer, image_token_cap=2)
    assert (_sums(packing, np.array([5, 5, 0])) > 2).sum() == 2
    assert sorted(packing.order.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"length": [1, 2]}, "equally long"),
        ({"length": [[1], [2], [3]]}, "one-dimensional"),
        ({"length": [1, 0, 3]}, "sample 1 has length 0"),
        ({"length": [1, 2, 99]}, "sample 2 has length 99"),
        ({"length": [1.5, 2, 3]}, "integers"),
        ({"image_tokens": [0, -1, 0]}, "sample 1 has image_tokens -1"),
        ({"num_patches": [0, 0, -4]}, "sample 2 has num_patches -4"),
        ({"num_images": [-2, 0, 0]}, "sample 0 has num_images -2"),
        ({"cost": [1]}, "equally long"),
        ({"cost": [0, -1, 0]}, "sample 1 has cost -1"),
        ({"cost": [1 << 62, 1 << 62, 0]}, "cost of the samples sums"),
    ],
)
def test_wrong_samples(changes: dict[str, Any], match: str) -> None:
    names = ("length", "image_tokens", "num_patches", "num_images", "cost")
    columns = {name: [1, 1, 1] for name in names}
    with pytest.raises(ValueError, match=match):
        pack(**{**columns, **changes}, rules=PackRules(packer="lbf", pack_length=8))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"packer": "magic"}, "known packers: balanced, best_fit"),
        ({"pack_length": 0}, "pack_length is 0"),
        ({"open_bins": 0}, "open_bins is 0"),
        ({"image_token_cap": 0}, "image_token_cap is 0"),
        ({"patch_cap": -1}, "patch_cap is -1"),
        ({"image_cap": 0}, "image_cap is 0"),
        ({"reference_ranks": 0}, "reference_ranks is 0"),
        ({"reference_micro_steps": 0}, "reference_micro_steps is 0"),
        ({"llm_vit_ratio": "fast"}, "llm_vit_ratio is 'fast'"),
        ({"llm_vit_ratio": "1/0"}, "llm_vit_ratio is '1/0'"),
        ({"llm_vit_ratio": "0"}, "llm_vit_ratio is '0'"),
    ],
)
def test_wrong_rules(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PackRules(**{"packer": "lbf", "pack_length": 8, **changes})


def test_the_ratio_is_exact() -> None:
    rules = PackRules(packer="balanced", pack_length=8, llm_vit_ratio="4.4")
    assert rules.ratio == Fraction(22, 5)
