"""What a sample costs: tokens, patches and the vision encoder's time, from metadata alone.

Invariants: integers only; every value is a sum over a sample's images, so a pack's is the sum over
its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.settings import CostModel
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import VisionRules, target_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMeasures:
    """int64 [N] each, one value a sample."""

    length: NDArray[np.int64]
    """Tokens, image tokens included."""
    loss_tokens: NDArray[np.int64]
    image_tokens: NDArray[np.int64]
    num_images: NDArray[np.int64]
    num_patches: NDArray[np.int64]
    cost: NDArray[np.int64]


def vit_cost(patches: NDArray[np.int64], p_ref: int) -> NDArray[np.int64]:
    """Per image p * (p_ref + p): the integer form of p * (1 + p / p_ref)."""
    return patches * (p_ref + patches)


def sum_groups(values: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of values[offsets[i]:offsets[i+1]], empty groups included: int64 [len(offsets) - 1]."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def measure(
    columns: SampleColumns, *, rules: VisionRules, cost: CostModel, p_ref: int
) -> SampleMeasures:
    """Everything the plan needs to know of samples; `cost` chooses the balance measure."""
    height, width = target_sizes(columns.height, columns.width, rules)
    patches = (height // rules.patch) * (width // rules.patch)
    tokens = patches // rules.merge**2
    offsets = columns.image_offsets
    image_tokens = sum_groups(tokens, offsets)
    return SampleMeasures(
        length=columns.text_tokens + image_tokens,
        loss_tokens=columns.loss_tokens,
        image_tokens=image_tokens,
        num_images=np.diff(offsets),
        num_patches=sum_groups(patches, offsets),
        cost=sum_groups(vit_cost(patches, p_ref), offsets) if cost == "vit_cost" else image_tokens,
    )
