from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.packing import Packing, pack

PACKERS = ("next_fit", "best_fit", "lbf")
Ints = NDArray[np.int64]


def _workload(count: int, seed: int, capacity: int = 8192) -> tuple[Ints, Ints]:
    rng = np.random.Generator(np.random.Philox(seed))
    length = np.clip(np.exp(rng.normal(6.7, 1.0, count)), 1, capacity).astype(np.int64)
    images = np.where(rng.random(count) < 0.3, np.minimum(length, rng.integers(1, 3000, count)), 0)
    return length, images


def _sums(packing: Packing, values: Ints) -> Ints:
    return np.add.reduceat(values[packing.order], packing.offsets[:-1])


def _fill(packing: Packing, length: Ints, capacity: int = 8192) -> float:
    return float(length.sum() / (packing.num_packs * capacity))


samples = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=80)


@pytest.mark.parametrize("packer", PACKERS)
@settings(deadline=None, max_examples=60)
@given(samples=samples, cap=st.none() | st.integers(1, 70), bins=st.integers(1, 5))
def test_every_sample_once_within_both_limits(
    packer: str, samples: list[tuple[int, int]], cap: int | None, bins: int
) -> None:
    length = np.array([size for size, _ in samples], dtype=np.int64)
    images = np.array([min(size, img) for size, img in samples], dtype=np.int64)
    packing = pack(
        length, images, images, pack_length=60, packer=packer, image_token_cap=cap, open_bins=bins
    )
    assert sorted(packing.order.tolist()) == list(range(len(samples)))
    assert packing.offsets[0] == 0
    assert packing.offsets[-1] == len(samples)
    assert (np.diff(packing.offsets) > 0).all()
    for k in range(packing.num_packs):
        members = packing.order[packing.offsets[k] : packing.offsets[k + 1]]
        assert length[members].sum() <= 60
        if cap is not None and images[members].sum() > cap:
            assert (images[members] > 0).sum() == 1


@pytest.mark.parametrize(("packer", "least"), [("next_fit", 0.8), ("best_fit", 0.99)])
def test_fill_of_the_baselines(packer: str, least: float) -> None:
    length, images = _workload(4096, 1)
    assert _fill(pack(length, images, images, pack_length=8192, packer=packer), length) >= least


@pytest.mark.parametrize("seed", range(4))
def test_fill_of_lbf(seed: int) -> None:
    length, images = _workload(4096, seed)
    packing = pack(length, images, images, pack_length=8192, packer="lbf")
    assert _fill(packing, length) >= 0.999


def test_lbf_stays_full_under_an_image_cap() -> None:
    length, images = _workload(4096, 5)
    packing = pack(length, images, images, pack_length=8192, packer="lbf", image_token_cap=3000)
    assert _sums(packing, images).max() <= 3000
    assert _fill(packing, length) >= 0.995


def test_lbf_by_hand() -> None:
    """Oldest first (6), then 3 and 1 fill the 4 that are left; 8 and 2 pair up."""
    length = np.array([6, 3, 2, 1, 9, 8])
    packing = pack(length, length * 0, length * 0, pack_length=10, packer="lbf")
    packs = {
        tuple(packing.order[packing.offsets[k] : packing.offsets[k + 1]].tolist())
        for k in range(packing.num_packs)
    }
    assert packs == {(0, 1, 3), (2, 5), (4,)}


def test_seed_orders_packs_and_nothing_else() -> None:
    length, images = _workload(500, 2)

    def packs(seed: int) -> list[tuple[int, ...]]:
        found = pack(length, images, images, pack_length=8192, packer="lbf", seed=seed)
        bounds = zip(found.offsets[:-1], found.offsets[1:], strict=True)
        return [tuple(found.order[a:b].tolist()) for a, b in bounds]

    assert packs(1) == packs(1)
    assert packs(1) != packs(2)
    assert sorted(packs(1)) == sorted(packs(2))


def test_lbf_does_not_leave_the_emptiest_packs_to_the_end() -> None:
    length, images = _workload(2000, 3)
    packing = pack(length, images, images, pack_length=8192, packer="lbf")
    tokens = _sums(packing, length)
    emptiest = np.argsort(tokens)[:4]
    assert emptiest.min() < packing.num_packs * 3 // 4


@pytest.mark.parametrize("packer", PACKERS)
def test_nothing_to_pack(packer: str) -> None:
    packing = pack([], [], [], pack_length=8, packer=packer)
    assert packing.num_packs == 0
    assert packing.order.shape == (0,)


def test_single_sample_above_the_cap_ends() -> None:
    packing = pack([5, 5, 3], [5, 5, 0], [0, 0, 0], pack_length=8, packer="lbf", image_token_cap=2)
    assert packing.num_packs == 2
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
        ({"cost": [1]}, "equally long"),
        ({"packer": "magic"}, "known packers: best_fit, lbf, next_fit"),
        ({"patch_cap": 3}, "unknown limit 'patch_cap'"),
        ({"open_bins": 0}, "open_bins is 0"),
        ({"image_token_cap": 0}, "image_token_cap is 0"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {
        "length": [1, 2, 3],
        "image_tokens": [0, 0, 0],
        "cost": [0, 0, 0],
        "pack_length": 8,
        "packer": "lbf",
    }
    with pytest.raises(ValueError, match=match):
        pack(**{**arguments, **changes})
