"""Images in groups and shared among ranks: float64, against one call on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn

from dataservice.errors import ConfigError
from trainer_client import vision
from trainer_client.examples.tiny_vlm import ModelOptions, ModelSizes, VisionTower
from trainer_client.testing import FAKE_INFO
from trainer_client.vision import chunked_forward, cp_forward, share_images

RANKS = 4
IMAGES = {
    "many": [(4, 4), (2, 2), (8, 6), (2, 4), (6, 6), (4, 2), (2, 2)],
    "fewer than ranks": [(4, 6), (2, 2)],
    "one": [(4, 4)],
    "none": [],
}
"""Height and width in patches."""
CLOSE = 1e-12


class Deep(nn.Module):
    """A tower with a second output, as Qwen3-VL's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ModelSizes.of(FAKE_INFO, dim=8, vision_dim=8)
        self.tower = VisionTower(sizes, ModelOptions()).double()
        self.calls: list[int] = []

    def forward(self, patches: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(len(grid))
        embeddings = self.tower(patches, grid)
        return embeddings, embeddings.sin()


def inputs(name: str) -> tuple[Tensor, Tensor]:
    grid = torch.tensor([(1, *size) for size in IMAGES[name]], dtype=torch.int64).view(-1, 3)
    generator = torch.Generator().manual_seed(1)
    shape = int(grid.prod(dim=1).sum()), 24
    return torch.randn(shape, dtype=torch.float64, generator=generator), grid


def loss_of(outputs: Any, part: slice) -> Tensor:
    """Of some rows; each row counts differently, the second output only in part."""
    embeddings, deep = outputs
    weight = torch.arange(1, len(embeddings) + 1, dtype=torch.float64)[:, None]
    rows = weight * embeddings**2 + (weight * deep).where(weight > 2, 0.0)
    return rows[part].sum()


def gradient(encoder: Deep) -> list[float]:
    grads = [parameter.grad for parameter in encoder.parameters()]
    assert all(grad is not None for grad in grads), "every parameter takes part"
    flat = torch.cat([grad.flatten() for grad in grads if grad is not None])
    encoder.zero_grad()
    return flat.tolist()


def alone(name: str) -> tuple[tuple[Tensor, Tensor], list[float]]:
    """One call on all images; without one, zeros."""
    encoder = Deep()
    patches, grid = inputs(name)
    if not len(grid):
        width = sum(parameter.numel() for parameter in encoder.parameters())
        return (torch.zeros(0, 8), torch.zeros(0, 8)), [0.0] * width
    outputs = encoder(patches, grid)
    loss_of(outputs, slice(None)).backward()
    return outputs, gradient(encoder)


def differs(found: Any, expected: Any) -> float:
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (found, expected))
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


# ---- on four ranks ------------------------------------------------------------------------------


def own_rows(count: int, ranks: int, rank: int) -> slice:
    """A rank's share of the sequence: the last rank has none of the images' rows."""
    bounds = [count * i // max(1, ranks - 1) for i in range(ranks)] + [count]
    return slice(bounds[rank], bounds[rank + 1]) if ranks > 1 else slice(None)


def shared_run(
    name: str, group: dist.ProcessGroup, *, whole: bool, chunked: bool
) -> dict[str, Any]:
    encoder = Deep()
    patches, grid = inputs(name)
    used: Callable[..., Any] = encoder
    if chunked:
        used = functools.partial(chunked_forward, encoder, max_patches=20)
    outputs = cp_forward(used, patches, grid, group)
    count, ranks = len(outputs[0]), group.size()
    part = slice(None) if whole else own_rows(count, ranks, group.rank())
    loss_of(outputs, part).backward()
    reduced = torch.tensor(gradient(encoder), dtype=torch.float64)
    dist.all_reduce(reduced, group=group)
    expected, expected_gradient = alone(name)
    return {
        "outputs": max(map(differs, outputs, expected)),
        "gradient": differs(reduced / ranks if whole else reduced, expected_gradient),
        "images": encoder.calls,
    }


def own_slice(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
    """The wrong backward of a gather."""
    return gradients[ctx.group.rank()].contiguous(), None


def equal_calls(group: dist.ProcessGroup) -> dict[str, Any]:
    """Ranks with 4, 1, 0 and 2 groups of images."""
    encoder = Deep()
    patches, grid = inputs("many")
    mine = grid[: [7, 2, 0, 3][group.rank()]]
    patches = patches[: int(mine.prod(dim=1).sum())]
    outputs = chunked_forward(encoder, patches, mine, max_patches=48, group=group)
    loss_of(outputs, slice(None)).backward()
    found = gradient(encoder)
    reference = Deep()
    if len(mine):
        loss_of(reference(patches, mine), slice(None)).backward()
        expected = gradient(reference)
    else:
        expected = [0.0] * len(found)
    return {"calls": len(encoder.calls), "gradient": differs(found, expected)}


def rank_main(rank: int, _ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
        group = groups[rank // size]
        for name in IMAGES:
            for whole in (False, True):
                kind = f"{size} {name} {'whole' if whole else 'share'}"
                found[kind] = shared_run(name, group, whole=whole, chunked=False)
        found[f"{size} chunked"] = shared_run("many", group, whole=False, chunked=True)
    found["equal calls"] = equal_calls(group)
    vision._Gather.backward = staticmethod(own_slice)
    found["wrong"] = shared_run("many", group, whole=False, chunked=False)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("client.test_vision:rank_main", RANKS, tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("name", list(IMAGES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_images_give_the_gradient_of_one_rank(
    ranks: list[dict[str, Any]], size: int, name: str
) -> None:
    for rank in ranks:
        for kind in ("share", "whole"):
            found = rank[f"{size} {name} {kind}"]
            assert found["outputs"] < CLOSE
            assert found["gradient"] < 1e-10
            assert len(found["images"]) == 1
    calls = [ranks[rank][f"{size} {name} share"]["images"][0] for rank in range(size)]
    blank = size - min(size, len(IMAGES[name]))
    assert sum(calls) == len(IMAGES[name]) + blank


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shared_encoder_may_work_in_groups(ranks: list[dict[str, Any]], size: int) -> None:
    for rank in ranks:
        assert rank[f"{size} chunked"]["outputs"] < CLOSE
        assert rank[f"{size} chunked"]["gradient"] < 1e-10


def test_a_backward_that_keeps_its_own_slice_would_be_noticed(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["wrong"]["outputs"] < CLOSE for rank in ranks)
    assert all(rank["wrong"]["gradient"] > 1e-3 for rank in ranks)


def test_ranks_that_share_parameters_call_the_encoder_equally_often(
    ranks: list[dict[str, Any]],
) -> None:
    calls = [rank["equal calls"]["calls"] for rank in ranks]
    assert len(set(calls)) == 1
    assert calls[0] > 2
    assert all(rank["equal calls"]["gradient"] < 1e-10 for rank in ranks)


# ---- on one rank --------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("max_patches", [1, 20, 48, 10_000])
@pytest.mark.parametrize("name", list(IMAGES))
def test_groups_give_what_one_call_gives(name: str, max_patches: int, recompute: bool) -> None:
    encoder = Deep()
    patches, grid = inputs(name)
    outputs = chunked_forward(encoder, patches, grid, max_patches=max_patches, recompute=recompute)
    assert len(outputs[0]) == len(patches) // 4
    loss_of(outputs, slice(None)).backward()
    expected, expected_gradient = alone(name)
    assert max(map(differs, outputs, expected)) < CLOSE
    assert differs(gradient(encoder), expected_gradient) < 1e-10


def test_a_group_holds_whole_images_up_to_the_limit() -> None:
    encoder = Deep()
    patches, grid = inputs("many")  # of 16, 4, 48, 8, 36, 8 and 4 patches
    with torch.no_grad():
        chunked_forward(encoder, patches, grid, max_patches=48)
    assert encoder.calls == [2, 1, 2, 2]


def test_what_the_backward_pass_keeps_is_the_inputs() -> None:
    patches, grid = inputs("many")
    kept = []
    for recompute in (False, True):
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunked_forward(Deep(), patches, grid, max_patches=20, recompute=recompute)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 5


def test_images_go_to_ranks_by_cost() -> None:
    assert share_images([4096, 64, 64, 64], 2) == [[0], [1, 2, 3]]
    assert share_images([100, 100, 100, 100], 2, p_ref=1) == [[0, 2], [1, 3]]
    assert share_images([], 3) == [[], [], []]
    assert share_images([5], 3) == [[0], [], []]
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 4096, (200,), generator=generator).tolist()
    shares = share_images(sizes, 8)
    assert sorted(image for share in shares for image in share) == list(range(200))
    loads = [sum(sizes[i] * (4096 + sizes[i]) for i in share) for share in shares]
    assert max(loads) < 1.05 * sum(loads) / 8


def test_tiles_are_images_of_one_row() -> None:
    tiles = torch.randn(5, 3, 4, 4, dtype=torch.float64)

    def encoder(rows: Tensor, _grid: Tensor) -> Tensor:
        return rows.flatten(1)[:, :6].view(-1, 3, 2)

    grid = torch.ones(5, 3, dtype=torch.int64)
    outputs = chunked_forward(encoder, tiles, grid, max_patches=2, merge=1)
    assert isinstance(outputs, Tensor)
    assert torch.equal(outputs, encoder(tiles, grid))
    empty = chunked_forward(encoder, tiles[:0], grid[:0], max_patches=2, merge=1)
    assert isinstance(empty, Tensor)
    assert empty.shape == (0, 3, 2)


def test_what_does_not_fit_together_is_said() -> None:
    patches, grid = inputs("many")
    with pytest.raises(ConfigError, match="grid has 124 patches, patches has 120 rows"):
        chunked_forward(Deep(), patches[:-4], grid, max_patches=9)
    with pytest.raises(ConfigError, match="not one of each 1x1; give its own merge"):
        chunked_forward(Deep(), patches, grid, max_patches=99, merge=1, recompute=False)
    with pytest.raises(ConfigError, match="max_patches is 0, must be at least 1"):
        chunked_forward(Deep(), patches, grid, max_patches=0)


@pytest.mark.parametrize("name", list(IMAGES))
def test_qwen3_vl_in_groups(name: str) -> None:
    pytest.importorskip("transformers", reason="the real encoder needs transformers")
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        patch_size=2,
        out_hidden_size=8,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    torch.manual_seed(0)
    model = Qwen3VLVisionModel(config).double()

    def encoder(patches: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        made = model(patches, grid_thw=grid)
        return made.pooler_output, *made.deepstack_features

    patches, grid = inputs(name)
    loss_of(chunked_forward(encoder, patches, grid, max_patches=20), slice(None)).backward()
    found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    if not len(grid):
        assert all(not grad.any() for grad in found.values())
        return
    loss_of(encoder(patches, grid), slice(None)).backward()
    for key, parameter in model.named_parameters():
        assert differs(found[key], parameter.grad) < 1e-10, key
