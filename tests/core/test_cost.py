from __future__ import annotations

import numpy as np

from dataservice.core.cost import measure, sum_groups, vit_cost
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import VisionRules

RULES = VisionRules(patch=14, merge=2)


def _columns() -> SampleColumns:
    return SampleColumns(
        text_tokens=np.array([10, 20, 30]),
        loss_tokens=np.array([5, 6, 7]),
        image_offsets=np.array([0, 2, 2, 3]),
        width=np.array([56, 112, 224]),
        height=np.array([56, 56, 224]),
    )


def test_vit_cost_is_the_sum_over_images() -> None:
    measures = measure(_columns(), rules=RULES, cost="vit_cost", p_ref=100)
    patches = [16, 32, 256]
    assert measures.cost.tolist() == [16 * 116 + 32 * 132, 0, 256 * 356]
    assert measures.num_patches.tolist() == [48, 0, 256]
    assert measures.image_tokens.tolist() == [12, 0, 64]
    assert measures.length.tolist() == [22, 20, 94]
    assert measures.num_images.tolist() == [2, 0, 1]
    assert vit_cost(np.array(patches), 4096).tolist() == [p * (4096 + p) for p in patches]


def test_image_tokens_as_the_cost() -> None:
    measures = measure(_columns(), rules=RULES, cost="image_tokens", p_ref=100)
    assert measures.cost.tolist() == [12, 0, 64]


def test_sum_groups_with_empty_groups() -> None:
    assert sum_groups(np.array([1, 2, 3]), np.array([0, 0, 2, 2, 3])).tolist() == [0, 3, 0, 3]
    assert sum_groups(np.zeros(0, dtype=np.int64), np.array([0, 0])).tolist() == [0]
