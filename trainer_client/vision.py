"""Runs a vision encoder on parts of a pack's images: in groups, or shared among ranks.

Invariants: an image is never cut; embeddings come back in the order of the images, and they and the
gradients of the encoder are those of one call on all images; without an image the encoder runs all
the same, on one blank image whose embeddings are dropped, so that its parameters take part on every
rank and no collective is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dataservice.errors import ConfigError
from trainer_client.cost_terms import P_REF

Embeddings = Tensor | tuple[Tensor, ...]
"""Of the images in order: [sum of p / merge^2, ...], or several such (as Qwen3-VL's deepstack)."""
Encoder = Callable[[Tensor, Tensor], Embeddings]
"""(patches [P, ...], grid int64 [N, 3] with t * h * w rows of patches an image) to embeddings.

Tiles attend to themselves alone, so each is an image of its own: `torch.ones(num_tiles, 3)` as
grid, merge=1, and an encoder that returns [tiles, ...].
"""


def chunked_forward(
    encoder: Encoder,
    patches: Tensor,
    grid: Tensor,
    *,
    max_patches: int,
    merge: int = 2,
    recompute: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Embeddings:
    """The encoder on groups of consecutive images of at most `max_patches` patches together.

    An image with more is a group by itself. With `recompute` a group's activations are dropped
    and computed again in the backward pass, so that the peak is that of one group, for about a
    third more time; without it only the forward pass' passing memory is bounded.

    Where ranks share the encoder's parameters (FSDP, expert parallel), each call is a collective:
    give the `group` that shares them, and ranks with fewer groups run blank ones until all have
    run as many. Use what is returned in the loss even when it is empty.
    """
    if max_patches < 1:
        raise ConfigError(f"max_patches is {max_patches}, must be at least 1")
    sizes = _sizes(patches, grid)
    bounds = _groups(sizes, max_patches)
    num_groups = max(1, len(bounds))
    if group is not None:
        num_groups = _largest(num_groups, group, patches.device)

    def encode(rows: Tensor, images: Tensor) -> Embeddings:
        if recompute and torch.is_grad_enabled():
            outputs: Embeddings = checkpoint(encoder, rows, images, use_reentrant=False)
        else:
            outputs = encoder(rows, images)
        return _checked(outputs, len(rows), merge)

    found = []
    for start, stop in bounds:
        first, past = sum(sizes[:start]), sum(sizes[:stop])
        found.append(encode(patches[first:past], grid[start:stop]))
    for _ in range(num_groups - len(bounds)):
        found.append(encode(*_blank(patches, grid, merge)))
    num_rows = sum(sizes) // merge**2
    if isinstance(found[0], Tensor):
        return torch.cat(cast("list[Tensor]", found))[:num_rows]
    return tuple(torch.cat(parts)[:num_rows] for parts in zip(*found, strict=True))


def cp_forward(
    encoder: Encoder,
    patches: Tensor,
    grid: Tensor,
    group: dist.ProcessGroup,
    *,
    merge: int = 2,
    p_ref: int = P_REF,
) -> Embeddings:
    """Each rank encodes some of the images that all ranks of `group` hold; all get all embeddings.

    For context (or tensor, sequence) parallel ranks, which compute one sequence together: all give
    the same `patches` and `grid`. Images go to ranks by cost, p * (p_ref + p) of p patches; see
    `share_images`. The encoder may itself be a `chunked_forward`.

    **Gradients.** After the backward pass a rank's encoder gradients are those of its own images,
    of the loss of all ranks. Reduce them over the group just as the language model's: the *sum*
    where each rank's loss is that of its share of the sequence, the *mean* where every rank
    computes the whole loss. Either is then the gradient of one rank that does it all.

    Two bugs that trainers shipped here, and how they are avoided:
    - The rank that encodes an image is not the one whose share of the sequence holds its tokens.
      An all-gather whose backward hands back a rank's own slice loses what the others computed
      for it; here the backward is a reduce-scatter that adds up all ranks'.
    - A rank without an image does not enter the collectives, or enters them with nothing that
      needs a gradient, and the others wait for ever. Here it encodes a blank image, so forward and
      backward have the same collectives on every rank. For the backward's, use what is returned
      in the loss on every rank, also where it is empty or none of its rows are the rank's own.
    """
    sizes = _sizes(patches, grid)
    ranks, rank = group.size(), group.rank()
    shares = share_images(sizes, ranks, p_ref=p_ref)
    square = merge**2
    rows_of = [max(1, sum(sizes[image] for image in share) // square) for share in shares]
    if shares[rank]:
        at = torch.tensor(shares[rank], device=grid.device)
        own_rows = _ranges(sizes, shares[rank]).to(patches.device)
        rows, images = patches.index_select(0, own_rows), grid.index_select(0, at)
    else:
        rows, images = _blank(patches, grid, merge)
    outputs = _checked(encoder(rows, images), len(rows), merge)

    most = max(rows_of)
    place = _places([size // square for size in sizes], shares, most).to(patches.device)

    def gathered(own: Tensor) -> Tensor:
        padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        everyone: Tensor = _Gather.apply(padded, group)
        return everyone.flatten(0, 1).index_select(0, place)

    if isinstance(outputs, Tensor):
        return gathered(outputs)
    return tuple(gathered(own) for own in outputs)


def share_images(sizes: Sequence[int], ranks: int, *, p_ref: int = P_REF) -> list[list[int]]:
    """By rank, which images (ascending) of `sizes` patches each it encodes.

    The costliest image first, each to the rank with the least so far: at most 4/3 of the least
    possible largest share. The same on every rank; ties go to the lower image and rank.
    """
    costs = [size * (p_ref + size) for size in sizes]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(costs)), key=lambda image: -costs[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += costs[image]
    return [sorted(share) for share in shares]


class _Gather(torch.autograd.Function):
    """[rows, ...] of each rank to [ranks, rows, ...] on all; backward adds up all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        everyone = own.new_empty(group.size(), *own.shape)
        dist.all_gather(list(everyone.unbind()), own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        everyone = gradients[0].contiguous()
        own = torch.empty_like(everyone[0])
        dist.reduce_scatter(own, list(everyone.unbind()), group=ctx.group)
        return own, None


def _sizes(patches: Tensor, grid: Tensor) -> list[int]:
    """Rows of `patches` of each image."""
    sizes: list[int] = grid.prod(dim=1).tolist()
    if sum(sizes) != len(patches):
        raise ConfigError(
            f"grid has {sum(sizes)} patches, patches has {len(patches)} rows; give both of the "
            "same images (of tiles: a grid of ones, one row a tile)"
        )
    return sizes


def _groups(sizes: Sequence[int], max_patches: int) -> list[tuple[int, int]]:
    """Of consecutive images: (first, past the last)."""
    bounds: list[tuple[int, int]] = []
    held = 0
    for image, size in enumerate(sizes):
        if bounds and held + size <= max_patches:
            bounds[-1] = bounds[-1][0], image + 1
            held += size
        else:
            bounds.append((image, image + 1))
            held = size
    return bounds


def _largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    most = torch.tensor([number], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _blank(patches: Tensor, grid: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """The smallest image there can be."""
    return patches.new_zeros(merge**2, *patches.shape[1:]), grid.new_tensor([[1, merge, merge]])


def _checked(outputs: Embeddings, num_patches: int, merge: int) -> Embeddings:
    """A list becomes a tuple; ConfigError for another number of rows."""
    many = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    for output in many:
        if len(output) != num_patches // merge**2:
            raise ConfigError(
                f"the encoder made {len(output)} embeddings of {num_patches} patches, not one of "
                f"each {merge}x{merge}; give its own merge (1 of tiles)"
            )
    return outputs if isinstance(outputs, Tensor) else many


def _ranges(sizes: Sequence[int], images: Sequence[int]) -> Tensor:
    """int64: the rows of these images among those of all."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return torch.cat([torch.arange(ends[image] - sizes[image], ends[image]) for image in images])


def _places(rows: Sequence[int], shares: Sequence[Sequence[int]], most: int) -> Tensor:
    """int64: where each image's embeddings are, in its order, among `most` rows of each rank."""
    starts = [0] * len(rows)
    for rank, share in enumerate(shares):
        at = rank * most
        for image in share:
            starts[image] = at
            at += rows[image]
    ranges = [torch.arange(start, start + n) for start, n in zip(starts, rows, strict=True)]
    return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64)
