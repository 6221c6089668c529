"""A tiny vision-language model in plain torch, with the switches that large ones are trained with.

Invariants: attention stays inside a document and inside an image; every switch but the dummy image
changes time and memory, never the result beyond rounding; the vision tower runs on every
micro-batch, without images on a blank one, so that every parameter takes part on every rank.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from dataservice.errors import ConfigError
from dataservice.wire.messages import SessionOpened
from trainer_client import MicroBatch, normalize
from trainer_client.batch import IGNORE
from trainer_client.vision import chunked_forward

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

Attention = Literal["auto", "flash", "mask", "segments"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Of the data (from `PackStream.open()`), and of the model."""

    vocab_size: int
    image_token: int
    pack_length: int
    patch: int
    merge: int
    temporal_patch: int
    tile: int = 0
    """Side of a tile in pixels; 0: pictures are patches."""
    dim: int = 64
    layers: int = 2
    vision_dim: int = 32
    vision_layers: int = 1
    heads: int = 4

    @classmethod
    def of(cls, info: SessionOpened, **model: int) -> ModelSizes:
        """For the packs of a stream; `model` sets the model's own sizes."""
        return cls(
            vocab_size=info.vocab_size,
            image_token=info.image_token,
            pack_length=info.pack_length,
            patch=info.patch,
            merge=_tile_merge(info) if info.tile else info.merge,
            temporal_patch=1 if info.tile else info.temporal_patch,
            tile=info.tile,
            **model,
        )


def _tile_merge(info: SessionOpened) -> int:
    """Side of the squares of a tile's patches that become one token."""
    side = info.tile // info.patch
    merge = math.isqrt(side**2 // info.tile_tokens)
    if side % merge or (side // merge) ** 2 != info.tile_tokens:
        raise ConfigError(
            f"vision.tile_tokens is {info.tile_tokens}: this example's model merges squares of the "
            f"{side}x{side} patches of a tile; set a square of a divisor of {side}"
        )
    return merge


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How the same model is computed."""

    attention: Attention = "auto"
    """flash: FlashAttention by torch (CUDA, bfloat16 or float16); segments: SDPA, one after the
    other; mask: SDPA under a block-diagonal mask, quadratic, but no loop to compile. auto: flash
    where it runs, else segments, or mask where the tower is compiled."""
    compile: str = ""
    """A backend of torch.compile for the vision blocks, with dynamic shapes; "": not compiled."""
    recompute: Recompute = "none"
    """Activations of each block that are computed again in the backward pass; selective keeps the
    results of matrix products and attention."""
    max_patches: int = 0
    """Images go through the vision tower in groups up to so many patches; 0: all at once."""
    dummy_image: bool = True
    """Whether the vision tower runs on micro-batches without images."""


# ---- attention ----------------------------------------------------------------------------------


class Segments(NamedTuple):
    """What attends to itself alone, of T rows; fields that `kind` does not read are empty."""

    kind: str
    lengths: list[int]
    cu_seqlens: Tensor
    """int32 [segments + 1]"""
    longest: int
    ids: Tensor
    """int64 [T]: number of each row's segment."""


def make_segments(lengths: list[int], like: Tensor, kind: str) -> Segments:
    ends = torch.tensor([0, *lengths], device=like.device)
    empty = ends[:0]
    if kind == "segments":
        return Segments(kind, lengths, empty, 0, empty)
    if kind == "flash":
        return Segments(kind, [], ends.cumsum(0).int(), max(lengths), empty)
    numbers = torch.arange(len(lengths), device=like.device)
    return Segments(kind, [], empty, 0, numbers.repeat_interleave(ends[1:]))


def attention_kind(wanted: Attention, x: Tensor, *, compiled: bool) -> str:
    """For rows like `x`. ConfigError for flash where it does not run."""
    runs = (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and varlen_attn is not None
        and "window_size" in inspect.signature(varlen_attn).parameters
    )
    if wanted == "flash" and not runs:
        raise ConfigError(
            f"attention: flash needs CUDA, bfloat16 or float16 and torch 2.13, here are {x.device} "
            f"and {x.dtype}; use auto"
        )
    if wanted == "auto":
        return "flash" if runs else "mask" if compiled else "segments"
    return wanted


def attend(qkv: Tensor, segments: Segments, *, causal: bool) -> Tensor:
    """[T, 3, heads, width] to [T, heads, width], each segment by itself."""
    if segments.kind == "segments":
        parts = [_sdpa(part, None, causal) for part in qkv.split(segments.lengths)]
        return torch.cat(parts)
    if segments.kind == "flash":
        query, key, value = qkv.unbind(1)
        bounds, longest = segments.cu_seqlens, segments.longest
        window = (-1, 0) if causal else (-1, -1)
        attended = varlen_attn(
            query, key, value, bounds, bounds, longest, longest, window_size=window
        )
        assert isinstance(attended, Tensor)
        return attended
    mask = segments.ids[:, None] == segments.ids[None, :]
    return _sdpa(qkv, mask.tril() if causal else mask, False)


def _sdpa(qkv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1)
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal
    )
    return attended.squeeze(0).transpose(0, 1)


# ---- model --------------------------------------------------------------------------------------

_ATEN = torch.ops.aten
KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operations whose results selective recomputation keeps."""


class Block(nn.Module):
    """Pre-norm transformer block; attention stays inside the given segments."""

    def __init__(self, dim: int, heads: int, *, causal: bool, recompute: Recompute) -> None:
        super().__init__()
        self.heads, self.causal, self.recompute = heads, causal, recompute
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """x [T, dim]"""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._layers(x, segments)
        keeping = noop_context_fn
        if self.recompute == "selective":
            keeping = functools.partial(create_selective_checkpoint_contexts, KEPT)
        result: Tensor = checkpoint(
            self._layers, x, segments, use_reentrant=False, context_fn=keeping
        )
        return result

    def _layers(self, x: Tensor, segments: Segments) -> Tensor:
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1)
        x = x + self.out(attend(qkv, segments, causal=self.causal).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """Patches [P, F] to image embeddings [P / merge^2, dim], each image by itself."""

    def __init__(self, sizes: ModelSizes, options: ModelOptions) -> None:
        super().__init__()
        self.merge, self.options = sizes.merge, options
        self.num_values = 3 * sizes.temporal_patch * sizes.patch**2
        width = sizes.vision_dim
        self.embed, self.place = nn.Linear(self.num_values, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            Block(width, sizes.heads, causal=False, recompute=options.recompute)
            for _ in range(sizes.vision_layers)
        )
        if options.compile:
            for block in self.blocks:
                block.compile(dynamic=True, backend=options.compile)
        square = width * sizes.merge**2
        self.merger = nn.Sequential(nn.LayerNorm(square), nn.Linear(square, sizes.dim))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """`grid` int64 [N, 3]: frames, height and width of each image, in patches."""
        images = grid.tolist()
        places = torch.cat([self._places(height, width) for _, height, width in images])
        x = self.embed(patches) + self.place(places.to(patches))
        compiled = bool(self.options.compile)
        kind = attention_kind(self.options.attention, x, compiled=compiled)
        segments = make_segments([math.prod(image) for image in images], x, kind)
        for block in self.blocks:
            x = block(x, segments)
        return self.merger(x.view(len(x) // self.merge**2, -1))

    def _places(self, height: int, width: int) -> Tensor:
        """[h * w, 2]: where each patch is, in 0..1, in the order (h/m, w/m, m, m)."""
        m = self.merge
        rows = torch.linspace(0, 1, height, dtype=torch.float64).view(-1, 1).expand(height, width)
        columns = torch.linspace(0, 1, width, dtype=torch.float64).expand(height, width)
        both = torch.stack([rows, columns], dim=-1).view(height // m, m, width // m, m, 2)
        return both.transpose(1, 2).reshape(-1, 2)


class TinyVLM(nn.Module):
    """A causal language model whose image tokens are replaced by image embeddings."""

    shards: dist.ProcessGroup | None = None
    """The ranks that hold the vision tower's parameters together, see `shard`."""

    def __init__(self, sizes: ModelSizes, options: ModelOptions | None = None) -> None:
        super().__init__()
        self.sizes, self.options = sizes, options or ModelOptions()
        self.vision = VisionTower(sizes, self.options)
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.positions = nn.Embedding(sizes.pack_length, sizes.dim)
        self.blocks = nn.ModuleList(
            Block(sizes.dim, sizes.heads, causal=True, recompute=self.options.recompute)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Sum of the token losses of a micro-batch."""
        ids, dtype = batch["input_ids"], self.head.weight.dtype
        x = self.tokens(ids) + self.positions(batch["position_ids"])
        if len(batch["image_grid_thw"]) or self.options.dummy_image:
            at = (ids == self.sizes.image_token).nonzero().squeeze(1)
            x = x.index_copy(0, at, self._images(batch, dtype))
        kind = attention_kind(self.options.attention, x, compiled=False)
        segments = make_segments(batch["cu_seqlens"].diff().tolist(), x, kind)
        for block in self.blocks:
            x = block(x, segments)
        logits = self.head(self.norm(x))
        # token t predicts token t + 1; across documents the label is -100
        return functional.cross_entropy(
            logits[:-1].float() if dtype == torch.bfloat16 else logits[:-1],
            batch["labels"][1:],
            ignore_index=IGNORE,
            reduction="sum",
        )

    def _images(self, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
        """[image tokens, dim]; empty, yet with the vision tower behind it, without images."""
        patches, grid = normalize(batch, dtype), batch["image_grid_thw"]
        if self.sizes.tile:
            patches, grid = self._of_tiles(patches, grid)
        in_groups = self.options.max_patches > 0
        images = chunked_forward(
            self.vision,
            patches,
            grid,
            max_patches=self.options.max_patches or max(1, len(patches)),
            merge=self.sizes.merge,
            recompute=in_groups,
            group=self.shards if in_groups else None,
        )
        assert isinstance(images, Tensor)
        return images

    def _of_tiles(self, tiles: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Tiles [n, 3, side, side] as images of patches in the order (h/m, w/m, m, m)."""
        m, p = self.sizes.merge, self.sizes.patch
        side = self.sizes.tile // p
        cut = tiles.view(len(tiles), 3, side // m, m, p, side // m, m, p)
        patches = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * p * p)
        return patches, grid.new_tensor([[1, side, side]]).expand(len(tiles), 3)


def build_model(
    sizes: ModelSizes, options: ModelOptions | None = None, *, seed: int = 0
) -> TinyVLM:
    torch.manual_seed(seed)  # the same on every rank, as DDP expects
    return TinyVLM(sizes, options)


def shard(model: TinyVLM) -> None:
    """FSDP2 over all ranks of the job, in place: each block, the vision tower, and the rest."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in [*model.vision.blocks, *model.blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model.vision, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.shards = mesh.get_group()
