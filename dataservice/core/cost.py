"""What a sample costs: tokens, patches and the vision encoder's time, from metadata alone.

Invariants: integers only; the image terms are sums over a sample's images, so a pack's are the sums
over its samples, and so is its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.fitted import FS_PER_NS, FittedCost
from dataservice.core.limits import MAX_COST
from dataservice.core.settings import CostModel
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import (
    VisionRules,
    num_patches,
    planned_sizes,
    squared,
    tokens_of,
)
from dataservice.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMeasures:
    """int64 [N] each, one value a sample."""

    length: Ints
    """Tokens, image tokens included."""
    loss_tokens: Ints
    image_tokens: Ints
    num_images: Ints
    num_patches: Ints
    patches_squared: Ints
    """Sum of p^2 over the sample's images, or their tiles."""


def sum_groups(values: Ints, offsets: Ints) -> Ints:
    """Sums of values[offsets[i]:offsets[i+1]], empty groups included: int64 [len(offsets) - 1]."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def sample_cost(
    model: CostModel,
    *,
    num_patches: Ints,
    patches_squared: Ints,
    image_tokens: Ints,
    length: Ints,
    p_ref: int,
    fitted: FittedCost | None,
) -> Ints:
    """int64 [N]: what each sample, or piece of one, adds to its pack's cost.

    All arrays are int64 [N]; `length` is that of the piece, for attention never leaves it.
    vit_cost: the sum over images, or tiles, of p * (p_ref + p), the integer form of
    p * (1 + p / p_ref); image_tokens: their number; fitted: nanoseconds, see `nanoseconds`.
    ConfigError for `fitted` without coefficients, and for costs that add up to more than MAX_COST.
    """
    if model == "vit_cost":
        _check_total(p_ref * _total(num_patches) + _total(patches_squared), "lower plan.p_ref or")
        return p_ref * num_patches + patches_squared
    if model == "image_tokens":
        return image_tokens
    if fitted is None:
        raise ConfigError(
            "plan.cost_file: is required with plan.cost: fitted; "
            "`dataservice fit-cost TIMINGS --out FILE` writes one"
        )
    terms = (
        (fitted.patches_fs, num_patches),
        (fitted.patches_squared_fs, patches_squared),
        (fitted.length_squared_fs, length * length),
    )
    total_fs = sum(coefficient * _total(values) for coefficient, values in terms)
    _check_total(total_fs // FS_PER_NS, "look at the unit of the times of plan.cost_file, or lower")
    return nanoseconds(*terms)


def _total(values: Ints) -> int:
    """Of values of 0 or more; never overflows."""
    high, low = values >> 32, values & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum())


def _check_total(total: int, remedy: str) -> None:
    if total > MAX_COST:
        raise ConfigError(
            f"plan.cost: the samples of a window add up to {total:,}, more than {MAX_COST:,}; "
            f"{remedy} vision.max_pixels (max_tiles of tiles)"
        )


def nanoseconds(*terms: tuple[int, Ints]) -> Ints:
    """The sum over terms of coefficient (femtoseconds, at most 10^12) * values, half a ns up.

    With c * v = c * (v // 10^6) * 10^6 + c * (v % 10^6) nothing overflows int64 while a cost is
    below 2^63 ns (292 years) and there are at most 9 terms: the second part is below 10^18 a term.
    At 1 ns a token^2, that is a document of 3 billion tokens.
    """
    whole, rest = np.zeros((2, len(terms[0][1])), dtype=np.int64)
    for coefficient, values in terms:
        high, low = np.divmod(values, FS_PER_NS)
        whole += coefficient * high
        rest += coefficient * low
    total: Ints = whole + (rest + FS_PER_NS // 2) // FS_PER_NS
    return total


def measure(columns: SampleColumns, *, rules: VisionRules) -> SampleMeasures:
    """Everything that costs and limits are made of, for whole samples."""
    height, width = planned_sizes(columns.height, columns.width, rules)
    patches = num_patches(height, width, rules)
    offsets = columns.image_offsets
    image_tokens = sum_groups(tokens_of(patches, rules), offsets)
    return SampleMeasures(
        length=columns.text_tokens + image_tokens,
        loss_tokens=columns.loss_tokens,
        image_tokens=image_tokens,
        num_images=np.diff(offsets),
        num_patches=sum_groups(patches, offsets),
        patches_squared=sum_groups(squared(patches, rules), offsets),
    )
