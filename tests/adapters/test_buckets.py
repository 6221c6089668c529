"""Padding to buckets: the same losses and gradients, few shapes, nothing recompiled beyond them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import (
    IMAGE,
    INFO,
    assert_same_gradients,
    gradients,
    loss_sum,
    micro_batch,
    mixed_batch,
    qwen2_5_vl,
    qwen3_vl,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from dataservice.errors import ConfigError
from trainer_client.adapters.buckets import (
    BucketedTower,
    SizeBuckets,
    bucketed_forward,
    pad_images,
)
from trainer_client.adapters.qwen_vl import qwen_vl_inputs
from trainer_client.testing import synthetic_packs

BUCKETS = SizeBuckets.geometric(
    max_patches=1024, max_images=64, merge=INFO.merge, min_patches=32, growth=1.5
)


@pytest.mark.parametrize("build", [qwen2_5_vl, qwen3_vl])
def test_the_same_loss_and_gradients_with_and_without(build: Any) -> None:
    model, batch = build(), mixed_batch()
    inputs = qwen_vl_inputs(batch, image_token=IMAGE, dtype=torch.float64)
    plain = loss_sum(model(**inputs).logits, inputs["labels"])
    expected = gradients(model, plain)
    tower = BucketedTower(model.model.visual, BUCKETS)
    padded = loss_sum(model(**inputs).logits, inputs["labels"])
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(model, padded), expected)
    ((patches, images),) = tower.shapes
    assert patches in BUCKETS.patches and images in BUCKETS.images
    assert patches > len(batch["pixel_values"])
    tower.remove()
    assert torch.equal(loss_sum(model(**inputs).logits, inputs["labels"]), plain)
    assert len(tower.shapes) == 1


def test_shapes_of_many_packs_are_few() -> None:
    before, after = set(), set()
    for seed in range(40):
        packs = synthetic_packs(4, seed=seed, image_share=0.75, info=INFO)
        batch = micro_batch(*packs[: seed % 4 + 1])
        pixels, grid = batch["pixel_values"], batch["image_grid_thw"]
        before.add((len(pixels), len(grid)))
        padded, padded_grid = pad_images(pixels, grid, BUCKETS)
        after.add((len(padded), len(padded_grid)))
        assert len(padded) == padded_grid.prod(dim=1).sum()
        assert torch.equal(padded[: len(pixels)], pixels) and not padded[len(pixels) :].any()
        assert torch.equal(padded_grid[: len(grid)], grid)
        assert not (padded_grid[:, 1:] % INFO.merge).any()
    assert len(before) >= 30 > 3 * len(after)
    assert len(after) <= BUCKETS.num_shapes


@pytest.mark.parametrize("seed", range(20))
def test_every_size_fits(seed: int) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    images = int(rng.integers(0, 64))
    patches = 4 * int(rng.integers(images, 192))
    size, count = BUCKETS.sizes(patches, images)
    assert size in BUCKETS.patches and count in BUCKETS.images
    assert count > images and size - patches >= 4 * (count - images)


def test_sizes_beyond_the_largest_bucket_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"patches of the buckets end at \d+, .* needs 4004"):
        BUCKETS.sizes(4000, 7)
    with pytest.raises(ConfigError, match="images of the buckets end at 128"):
        BUCKETS.sizes(4000, 128)


def encoder_of(width: int) -> Any:
    torch.manual_seed(0)
    first = torch.nn.Linear(width, 8).double()
    last = torch.nn.Linear(8 * INFO.merge**2, 5).double()

    def encode(pixels: Tensor, grid: Tensor) -> Tensor:
        """Every image by itself: its mean is taken away."""
        hidden = first(pixels)
        number = torch.repeat_interleave(
            torch.arange(len(grid)), grid.prod(dim=1), output_size=len(pixels)
        )
        sums = hidden.new_zeros(len(grid), 8).index_add(0, number, hidden)
        hidden = hidden - (sums / grid.prod(dim=1, keepdim=True))[number]
        return last(torch.nn.functional.gelu(hidden).view(-1, 8 * INFO.merge**2))

    return encode, [*first.parameters(), *last.parameters()]


def test_any_encoder_and_no_image_at_all() -> None:
    batch = mixed_batch()
    pixels = batch["pixel_values"].double()
    encode, parameters = encoder_of(pixels.shape[1])
    plain = encode(pixels, batch["image_grid_thw"])
    padded = bucketed_forward(encode, pixels, batch["image_grid_thw"], BUCKETS)
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-12)
    none = bucketed_forward(encode, pixels[:0], batch["image_grid_thw"][:0], BUCKETS)
    assert none.shape == (0, 5)
    (0 * none.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


def test_a_compiled_encoder_is_compiled_once_a_shape() -> None:
    batches = [
        micro_batch(*synthetic_packs(2, seed=seed, image_share=1.0, info=INFO))
        for seed in range(10)
    ]
    encode, _ = encoder_of(batches[0]["pixel_values"].shape[1])

    def compilations(forward: Any) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        with torch._dynamo.config.patch(recompile_limit=64):
            compiled = torch.compile(encode, backend=counter, dynamic=False)
            for batch in batches:
                forward(compiled, batch["pixel_values"].double(), batch["image_grid_thw"])
        return counter.frame_count

    plain = compilations(lambda compiled, pixels, grid: compiled(pixels, grid))
    shapes = {
        BUCKETS.sizes(len(batch["pixel_values"]), len(batch["image_grid_thw"])) for batch in batches
    }
    bucketed = compilations(
        lambda compiled, pixels, grid: bucketed_forward(compiled, pixels, grid, BUCKETS)
    )
    assert bucketed == len(shapes) < plain


def test_geometric_sizes() -> None:
    buckets = SizeBuckets.geometric(max_patches=16_384, max_images=100)
    assert (buckets.patches[0], len(buckets.patches), len(buckets.images)) == (1024, 14, 5)
    assert buckets.patches[-2] < 16_384 <= buckets.patches[-1]
    assert all(b / a < 1.26 for a, b in zip(buckets.patches, buckets.patches[1:], strict=False))
    assert buckets.sizes(15_000, 100)[1] == 128


@pytest.mark.parametrize("max_images", [1, 8, 31, 32, 100])
@pytest.mark.parametrize("max_patches", [64, 1024, 1280])
def test_the_largest_micro_batch_fits(max_patches: int, max_images: int) -> None:
    buckets = SizeBuckets.geometric(max_patches=max_patches, max_images=max_images)
    for images in range(max_images + 1):
        assert buckets.sizes(max_patches, images)[0] >= max_patches


@pytest.mark.parametrize(
    "sizes",
    [
        {"patches": (), "images": (1,)},
        {"patches": (8, 4), "images": (1,)},
        {"patches": (4,), "images": (0, 1)},
        {"patches": (6,), "images": (1,)},
    ],
)
def test_wrong_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(ConfigError):
        SizeBuckets(**sizes)
    with pytest.raises(ConfigError, match="growth"):
        SizeBuckets.geometric(max_patches=64, max_images=4, growth=1.0)
