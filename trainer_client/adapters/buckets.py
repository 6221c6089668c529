"""Patches and images padded to a few sizes, so that a compiled vision tower meets few shapes.

Invariants: pad images come last and are attended to by themselves alone, their outputs are cut off,
so features and gradients of the real images stay as they are; (patches, images) that the tower sees
are a pair of the buckets, whatever the micro-batch holds, also none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataservice.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeBuckets:
    """The sizes allowed, each ascending; every number of patches a multiple of `merge` squared."""

    patches: tuple[int, ...]
    images: tuple[int, ...]
    merge: int = 2

    def __post_init__(self) -> None:
        for name in ("patches", "images"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name} is {sizes}: give ascending sizes of at least 1")
        if any(size % self.merge**2 for size in self.patches):
            raise ConfigError(
                f"patches is {self.patches}: each must be a multiple of {self.merge**2}"
            )

    @classmethod
    def geometric(
        cls,
        *,
        max_patches: int,
        max_images: int,
        merge: int = 2,
        min_patches: int = 1024,
        growth: float = 1.25,
    ) -> SizeBuckets:
        """Every micro-batch of up to `max_patches` (`plan.patch_cap` times its packs) fits.

        Patches grow by `growth` to the first size that holds them and the pad images besides,
        images by 2 from 8 to beyond `max_images`. Up to 16,384 patches and 100 images that makes
        14 x 5 shapes at most. 20,000 made-up packs of 1,024 to 16,384 patches and up to 40 images,
        13,000 shapes, came to 30 with 13 % more patches; growth 1.125 to 52 with 7 %, 1.5 to 16
        with 23 %.
        """
        if growth <= 1:
            raise ConfigError(f"growth is {growth}, must be above 1")
        unit = merge**2
        images = [8]
        while images[-1] <= max_images:
            images.append(images[-1] * 2)
        most = max_patches + max(images[0], images[-1] // 2) * unit
        patches = [-(-min(min_patches, most) // unit) * unit]
        while patches[-1] < most:
            patches.append(-(-max(int(patches[-1] * growth), patches[-1] + 1) // unit) * unit)
        return cls(patches=tuple(patches), images=tuple(images), merge=merge)

    @property
    def num_shapes(self) -> int:
        """The most shapes that a tower can meet."""
        return len(self.patches) * len(self.images)

    def sizes(self, num_patches: int, num_images: int) -> tuple[int, int]:
        """(patches, images) to pad to: at least one pad image, each of `merge` squared patches.

        ConfigError where the largest bucket is too small.
        """
        images = _bucket("images", self.images, num_images + 1)
        least = num_patches + (images - num_images) * self.merge**2
        return _bucket("patches", self.patches, least), images


def _bucket(name: str, sizes: tuple[int, ...], least: int) -> int:
    for size in sizes:
        if size >= least:
            return size
    raise ConfigError(f"{name} of the buckets end at {sizes[-1]}, a micro-batch needs {least}")


def pad_images(pixels: Tensor, grid: Tensor, buckets: SizeBuckets) -> tuple[Tensor, Tensor]:
    """Patches [P, F] and grid int64 [N, 3] with zero images behind, of a size in the buckets.

    Pad images are one merge unit high and share the missing patches as evenly as they can.
    """
    num_patches, num_images = buckets.sizes(len(pixels), len(grid))
    merge, count = buckets.merge, num_images - len(grid)
    units, larger = divmod((num_patches - len(pixels)) // merge**2, count)
    widths = [units + 1] * larger + [units] * (count - larger)
    padding = grid.new_tensor([(1, merge, merge * width) for width in widths])
    rows = pixels.new_zeros((num_patches - len(pixels), *pixels.shape[1:]))
    return torch.cat([pixels, rows]), torch.cat([grid, padding])


def bucketed_forward(
    encoder: Callable[[Tensor, Tensor], Tensor], pixels: Tensor, grid: Tensor, buckets: SizeBuckets
) -> Tensor:
    """`encoder(pixels, grid)` [P / merge^2, dim], run at a size in the buckets.

    Without images the encoder still runs, on padding alone, and what comes back is empty: keep it
    in the graph (`loss + 0 * features.sum()`), and every rank's encoder takes part in backward.
    """
    features = encoder(*pad_images(pixels, grid, buckets))
    return features[: len(pixels) // buckets.merge**2]


class BucketedTower:
    """Makes a vision tower of transformers (`model.model.visual`) run at sizes in the buckets.

    Hooks around its forward pad `hidden_states` and `grid_thw` and cut what comes out, so the
    model around it, its state dict and FSDP notice nothing. Put it on before compiling:

        BucketedTower(model.model.visual, buckets)

    `shapes` holds the (patches, images) met so far. `remove()` takes the hooks off.
    """

    def __init__(self, tower: nn.Module, buckets: SizeBuckets) -> None:
        self.buckets = buckets
        self.shapes: set[tuple[int, int]] = set()
        self._num_patches: list[int] = []
        self._hooks = [
            tower.register_forward_pre_hook(self._pad, with_kwargs=True),
            tower.register_forward_hook(self._cut),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _pad(
        self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(zip(("hidden_states", "grid_thw"), args, strict=False)) | kwargs
        self._num_patches.append(len(named["hidden_states"]))
        pixels, grid = pad_images(named["hidden_states"], named["grid_thw"], self.buckets)
        self.shapes.add((len(pixels), len(grid)))
        return (), named | {"hidden_states": pixels, "grid_thw": grid}

    def _cut(self, _tower: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        num_patches = self._num_patches.pop()
        num_features = num_patches // self.buckets.merge**2
        output.last_hidden_state = output.last_hidden_state[:num_patches]
        output.pooler_output = output.pooler_output[:num_features]
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [f[:num_features] for f in output.deepstack_features]
        return output
