from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.vision import (
    VisionRules,
    image_tokens,
    num_patches,
    planned_size,
    planned_sizes,
    target_size,
)

# As computed by the published smart resize (factor 28, 3,136..1,003,520 pixels).
KNOWN = {
    (224, 224): (224, 224),
    (42, 70): (56, 56),  # 1.5 and 2.5 multiples: half to even
    (1000, 1500): (812, 1204),
    (2160, 3840): (728, 1316),
    (10, 12): (56, 84),
    (1, 200): (28, 812),
    (30, 4000): (28, 4004),
}


@pytest.mark.parametrize(("size", "expected"), KNOWN.items())
def test_known_sizes(size: tuple[int, int], expected: tuple[int, int]) -> None:
    rules = VisionRules()
    found = target_size(
        *size,
        patch=rules.patch,
        merge=rules.merge,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )
    assert found == expected


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1, max_size=40),
    patch=st.sampled_from([14, 16]),
    merge=st.sampled_from([1, 2]),
    low=st.sampled_from([1, 3136, 65536]),
    high=st.sampled_from([100_000, 1_003_520, 16_777_216]),
)
def test_vectorised_form_equals_the_scalar_one(
    sizes: list[tuple[int, int]], patch: int, merge: int, low: int, high: int
) -> None:
    rules = VisionRules(patch=patch, merge=merge, min_pixels=low, max_pixels=high)
    usable = [(h, w) for h, w in sizes if max(h, w) <= 200 * min(h, w)]
    pairs = np.array(usable, dtype=np.int64).reshape(-1, 2)
    found = np.stack(planned_sizes(pairs[:, 0], pairs[:, 1], rules), axis=1)
    for (height, width), got in zip(usable, found.tolist(), strict=True):
        want = target_size(height, width, patch=patch, merge=merge, min_pixels=low, max_pixels=high)
        assert tuple(got) == want == planned_size(height, width, rules)
        assert got[0] % (patch * merge) == 0
        assert got[1] % (patch * merge) == 0
        assert got[0] * got[1] > 0
        assert image_tokens(*want, rules) * merge**2 == num_patches(*want, rules)


@pytest.mark.parametrize("size", [(0, 10), (10, -1), (1, 201), (8020, 40)])
def test_unusable_sizes_are_refused_by_both(size: tuple[int, int]) -> None:
    rules = VisionRules()
    with pytest.raises(ValueError, match=r"aspect|at least 1"):
        target_size(*size, patch=14, merge=2, min_pixels=3136, max_pixels=10**6)
    with pytest.raises(ValueError, match="picture 1 of"):
        planned_sizes(np.array([20, size[0]]), np.array([20, size[1]]), rules)


def test_no_pictures() -> None:
    none = np.zeros(0, dtype=np.int64)
    height, width = planned_sizes(none, none, VisionRules())
    assert height.shape == width.shape == (0,)
