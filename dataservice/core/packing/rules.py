"""What packers take and give: the rules, a window's samples, the packs.

Invariants: values are checked when made; ratios are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.settings import Packer

DEFAULT_OPEN_BINS = 32

Ints = NDArray[np.int64]

_SUM_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRules:
    """What a window is packed by. ValueError for values that cannot be."""

    packer: Packer
    pack_length: int
    """Tokens."""
    open_bins: int = DEFAULT_OPEN_BINS
    """Packs open at once, of best_fit, budget_2d and nbin."""
    image_token_cap: int | None = None
    patch_cap: int | None = None
    image_cap: int | None = None
    """Images of a pack."""
    llm_vit_ratio: str = "1"
    """Of balanced: a pack's LLM time over the mean pack's ViT time; a decimal or fraction."""
    reference_ranks: int = 256
    """Of balanced, with `reference_micro_steps`: the grid whose waiting is kept least."""
    reference_micro_steps: int = 4

    def __post_init__(self) -> None:
        if self.packer not in get_args(Packer):
            known = ", ".join(sorted(get_args(Packer)))
            raise ValueError(f"packer is {self.packer!r}; known packers: {known}")
        for name in ("pack_length", "open_bins", "reference_ranks", "reference_micro_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("image_token_cap", "patch_cap", "image_cap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None for no cap")
        _ = self.ratio

    @property
    def ratio(self) -> Fraction:
        """llm_vit_ratio, exact."""
        try:
            ratio = Fraction(self.llm_vit_ratio)
        except (ValueError, ZeroDivisionError):
            ratio = Fraction(-1)
        if ratio <= 0:
            raise ValueError(
                f"llm_vit_ratio is {self.llm_vit_ratio!r}; it must be a positive decimal or "
                'fraction, such as "4.4" or "1/3"'
            )
        return ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Pack k holds samples order[offsets[k]:offsets[k+1]]."""

    order: NDArray[np.int64]
    """Sample numbers, a permutation of 0..N-1."""
    offsets: NDArray[np.int64]
    """int64 [num_packs + 1], strictly increasing."""

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """int64 [N] each, but for the caps."""

    length: NDArray[np.int64]
    image_tokens: NDArray[np.int64]
    num_images: NDArray[np.int64]
    cost: NDArray[np.int64]
    use: NDArray[np.int64]
    """[N, caps]: what of each cap a sample takes."""
    caps: NDArray[np.int64]
    """[caps], the tightest first."""


def checked_samples(
    length: ArrayLike,
    image_tokens: ArrayLike,
    num_patches: ArrayLike,
    num_images: ArrayLike,
    cost: ArrayLike,
    rules: PackRules,
) -> Samples:
    """ValueError for sizes that differ, values that are no integers, too small or too large."""
    columns = _columns(
        {
            "length": length,
            "image_tokens": image_tokens,
            "num_patches": num_patches,
            "num_images": num_images,
            "cost": cost,
        }
    )
    lengths = columns["length"]
    bad = np.flatnonzero((lengths < 1) | (lengths > rules.pack_length))
    if bad.size:
        raise ValueError(
            f"sample {bad[0]} has length {lengths[bad[0]]}; lengths must be in "
            f"1..{rules.pack_length} (split or drop longer samples, drop empty ones)"
        )
    use, caps = _capped(columns, rules)
    return Samples(
        length=lengths,
        image_tokens=columns["image_tokens"],
        num_images=columns["num_images"],
        cost=columns["cost"],
        use=use,
        caps=caps,
    )


def _columns(given: dict[str, ArrayLike]) -> dict[str, Ints]:
    raw = {name: np.asarray(values) for name, values in given.items()}
    if len({values.shape for values in raw.values()}) > 1 or raw["length"].ndim != 1:
        found = ", ".join(f"{name} {values.shape}" for name, values in raw.items())
        raise ValueError(f"columns must be one-dimensional and equally long, got {found}")
    columns: dict[str, Ints] = {}
    for name, values in raw.items():
        if values.size and values.dtype.kind not in "iu":
            raise ValueError(f"{name} has dtype {values.dtype}; it must hold integers")
        columns[name] = np.ascontiguousarray(values, dtype=np.int64)
        negative = np.flatnonzero(columns[name] < 0)
        if negative.size:
            place = negative[0]
            raise ValueError(f"sample {place} has {name} {columns[name][place]}, below 0")
        largest = int(columns[name].max(initial=0))
        if largest * len(values) >= _SUM_LIMIT and sum(columns[name].tolist()) >= _SUM_LIMIT:
            raise ValueError(f"{name} of the samples sums to 2**62 or more; scale it down")
    return columns


def _capped(columns: dict[str, Ints], rules: PackRules) -> tuple[Ints, Ints]:
    limits = {
        "image_token_cap": (columns["image_tokens"], rules.image_token_cap),
        "patch_cap": (columns["num_patches"], rules.patch_cap),
        "image_cap": (columns["num_images"], rules.image_cap),
    }
    active = [(values, cap) for values, cap in limits.values() if cap is not None]
    active.sort(key=lambda pair: Fraction(-int(pair[0].sum()), pair[1]))
    use = np.empty((len(columns["length"]), len(active)), dtype=np.int64)
    for place, (values, _) in enumerate(active):
        use[:, place] = values
    return use, np.array([cap for _, cap in active], dtype=np.int64)
