"""Train a tiny vision-language model on a PackStream, in plain torch: a starting point to copy.

    python -m trainer_client.examples.train_tiny_vlm --endpoint HOST:PORT --job demo
    torchrun --nproc-per-node 2 -m trainer_client.examples.train_tiny_vlm --endpoint HOST:PORT ...

What carries over to a real trainer:
- the loss of a micro-batch is the sum of its token losses over the step's *planned* loss tokens,
  times the number of ranks, since DDP averages gradients: then it does not matter which rank
  computes which pack, and the service may place them freely;
- attention stays inside a document (`cu_seqlens`) and inside an image (`image_grid_thw`);
- labels are unshifted, each document's first one is -100: the shift happens in the loss;
- gradients are summed across ranks in the last micro-step only (`no_sync` before it);
- a micro-batch without images still runs the vision tower, on one dummy patch square, times 0,
  so that every parameter takes part on every rank;
- a checkpoint is taken between steps and holds the stream's state beside model and optimizer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dataservice.errors import ConfigError
from dataservice.wire.messages import SessionOpened
from trainer_client import MicroBatch, PackStream, ParallelLayout, normalize

IGNORE = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Of the data (from `PackStream.open()`), and of the model."""

    vocab_size: int
    image_token: int
    pack_length: int
    patch: int
    merge: int
    temporal_patch: int
    dim: int = 64
    layers: int = 2
    vision_dim: int = 32
    vision_layers: int = 1
    heads: int = 4

    @classmethod
    def of(cls, info: SessionOpened, **model: int) -> ModelSizes:
        """For the packs of a stream; `model` sets the model's own sizes. ConfigError for tiles."""
        if info.tile:
            raise ConfigError(
                f"this example's model reads patches, not tiles of {info.tile} pixels; set "
                "vision.mode: patches in the service's config"
            )
        return cls(
            vocab_size=info.vocab_size,
            image_token=info.image_token,
            pack_length=info.pack_length,
            patch=info.patch,
            merge=info.merge,
            temporal_patch=info.temporal_patch,
            **model,
        )


# ---- model --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block; attention stays inside the given segments."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x [T, dim]; `lengths` of the segments, in order, sum to T."""
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1)
        attended = [self._attend(segment) for segment in qkv.split(lengths)]
        x = x + self.out(torch.cat(attended).view(x.shape))
        return x + self.mlp(self.norm2(x))

    def _attend(self, qkv: Tensor) -> Tensor:
        """[n, 3, heads, width] of one segment to [n, heads, width]."""
        query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return attended.squeeze(0).transpose(0, 1)


class VisionTower(nn.Module):
    """Patches [P, F] to image embeddings [P / merge^2, dim], each image by itself."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.merge = sizes.merge
        self.num_values = 3 * sizes.temporal_patch * sizes.patch**2
        width = sizes.vision_dim
        self.embed, self.place = nn.Linear(self.num_values, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            Block(width, sizes.heads, causal=False) for _ in range(sizes.vision_layers)
        )
        square = width * sizes.merge**2
        self.merger = nn.Sequential(nn.LayerNorm(square), nn.Linear(square, sizes.dim))

    def forward(self, patches: Tensor, grid_thw: list[list[int]]) -> Tensor:
        places = torch.cat([self._places(height, width) for _, height, width in grid_thw])
        x = self.embed(patches) + self.place(places.to(patches))
        lengths = [frames * height * width for frames, height, width in grid_thw]
        for block in self.blocks:
            x = block(x, lengths)
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

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision = VisionTower(sizes)
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.positions = nn.Embedding(sizes.pack_length, sizes.dim)
        self.blocks = nn.ModuleList(
            Block(sizes.dim, sizes.heads, causal=True) for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Sum of the token losses of a micro-batch."""
        ids, dtype = batch["input_ids"], self.head.weight.dtype
        x = self.tokens(ids) + self.positions(batch["position_ids"])
        grid = batch["image_grid_thw"].tolist()
        if grid:
            images = self.vision(normalize(batch, dtype), grid)
            at = (ids == self.sizes.image_token).nonzero().squeeze(1)
            x = x.index_copy(0, at, images)
        else:
            m = self.sizes.merge
            dummy = torch.zeros(m * m, self.vision.num_values, dtype=dtype, device=x.device)
            x = x + 0 * self.vision(dummy, [[1, m, m]]).sum()
        lengths = batch["cu_seqlens"].diff().tolist()
        for block in self.blocks:
            x = block(x, lengths)
        logits = self.head(self.norm(x))
        # token t predicts token t + 1; across documents the label is -100
        return functional.cross_entropy(
            logits[:-1].float() if dtype == torch.bfloat16 else logits[:-1],
            batch["labels"][1:],
            ignore_index=IGNORE,
            reduction="sum",
        )


def build_model(sizes: ModelSizes, *, seed: int = 0) -> TinyVLM:
    torch.manual_seed(seed)  # the same on every rank, as DDP expects
    return TinyVLM(sizes)


# ---- training -----------------------------------------------------------------------------------


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[MicroBatch],
    *,
    after_step: Callable[[int, float], bool],
) -> None:
    """Gradient accumulation over any iterable of micro-batches; `model(batch)` is its loss sum.

    `after_step(step, loss)` is called when a step is done, with the loss of all ranks; False ends
    the training.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in batches:
        with _gradient_sync(model, now=batch.is_last_micro_step):
            loss = model(batch) * world_size / max(1, batch.meta["loss_tokens"])
            loss.backward()
        total = total + loss.detach()
        if not batch.is_last_micro_step:
            continue
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.is_initialized():
            dist.all_reduce(total)
        mean = total.item() / world_size
        total = torch.zeros_like(total)
        if not after_step(batch.step, mean):
            return


def _gradient_sync(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    if now or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def save_checkpoint(path: str, state: dict[str, Any]) -> None:
    """Whole or not at all: written beside, then renamed."""
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    distributed = "WORLD_SIZE" in os.environ
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if distributed:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        run(args)
    finally:
        if distributed:
            dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    stream = PackStream(
        args.endpoint,
        job=args.job,
        layout=ParallelLayout.data_parallel(
            rank, dist.get_world_size() if dist.is_initialized() else 1
        ),
        micro_steps=args.micro_steps,
        packs_per_cell=args.packs_per_cell,
        device=args.device,
    )
    with stream:
        saved = None
        if args.checkpoint and os.path.exists(args.checkpoint):
            saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
            stream.load_state_dict(saved["stream"])
        info = stream.open()
        if args.steps is not None and info.first_step >= args.steps:
            return
        plain = build_model(ModelSizes.of(info)).to(
            device=args.device, dtype=getattr(torch, args.dtype)
        )
        optimizer = torch.optim.AdamW(plain.parameters(), lr=args.lr)
        if saved is not None:
            plain.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

        def after_step(step: int, loss: float) -> bool:
            last = args.steps is not None and step + 1 >= args.steps
            if rank == 0:
                waited_s = stream.stats().waited_s
                print(f"step {step} loss {loss:.6f} waited {waited_s:.2f} s", flush=True)
                if args.checkpoint and (last or (step + 1) % args.checkpoint_every == 0):
                    state = {
                        "model": plain.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "stream": stream.state_dict(),  # the same on every rank
                    }
                    save_checkpoint(args.checkpoint, state)
            return not last

        model = DistributedDataParallel(plain) if dist.is_initialized() else plain
        train(model, optimizer, stream, after_step=after_step)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny vision-language model.")
    parser.add_argument("--endpoint", required=True, help="coordinator, host:port")
    parser.add_argument("--job", default="tiny-vlm")
    parser.add_argument("--micro-steps", type=int, default=2)
    parser.add_argument("--packs-per-cell", type=int, default=1)
    parser.add_argument("--steps", type=int, help="stop after this many in all; default: the data")
    parser.add_argument("--checkpoint", help="file to resume from, if it exists, and to write")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
