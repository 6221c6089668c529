"""Train a tiny vision-language model on a PackStream, in plain torch: a starting point to copy.

    python -m trainer_client.examples.train_tiny_vlm --endpoint HOST:PORT --job demo
    torchrun --nproc-per-node 2 -m trainer_client.examples.train_tiny_vlm --endpoint HOST:PORT ...

What carries over to a real trainer:
- the loss of a micro-batch is the sum of its token losses over the step's *planned* loss tokens,
  times the number of ranks, since DDP and FSDP average gradients: then it does not matter which
  rank computes which pack, and the service may place them freely;
- attention stays inside a document (`cu_seqlens`) and inside an image (`image_grid_thw`);
- labels are unshifted, each document's first one is -100: the shift happens in the loss;
- gradients are summed across ranks in the last micro-step only;
- a micro-batch without images still runs the vision tower, on one blank image that no token sees,
  so that every parameter takes part on every rank;
- a checkpoint is taken between steps, whole, and holds the stream's state beside model and
  optimizer: it goes on with any number of ranks, under DDP or FSDP.

What costs what is a switch each, see --help, and `benchmarks/train_options.py` for step times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.tiny_vlm import (
    ModelOptions,
    ModelSizes,
    TinyVLM,
    build_model,
    shard,
)
from trainer_client.timing import CostTimer

__all__ = ["ModelOptions", "ModelSizes", "TinyVLM", "build_model", "main", "train"]

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[MicroBatch],
    *,
    after_step: Callable[[int, float], bool],
    timer: CostTimer | None = None,
) -> None:
    """Gradient accumulation over any iterable of micro-batches; `model(batch)` is its loss sum.

    `after_step(step, loss)` is called when a step is done, with the loss of all ranks; False ends
    the training. `timer` times the micro-batches that wait for no other rank.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in batches:
        last = batch.is_last_micro_step
        with ExitStack() as around:
            around.enter_context(_gradient_sync(model, now=last))
            if timer is not None and (world_size == 1 or not last):
                around.enter_context(timer.micro_batch(batch))
            loss = model(batch) * world_size / max(1, batch.meta["loss_tokens"])
            loss.backward()
        total = total + loss.detach()
        if not last:
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
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    if now or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def parallel(model: TinyVLM, kind: str) -> nn.Module:
    """The model for all ranks of the job, "ddp" or "fsdp"; as it is, without one."""
    if not dist.is_initialized():
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    shard(model)
    return model


def save_checkpoint(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, stream: PackStream
) -> None:
    """Called on all ranks, written by rank 0; whole or not at all: written beside, then renamed."""
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        state = {"model": weights, "optimizer": moments, "stream": stream.state_dict()}
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
        model, optimizer = _model(args, ModelSizes.of(info))
        if saved is not None:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
                options=WHOLE,
            )

        unsaved = False

        def after_step(step: int, loss: float) -> bool:
            nonlocal unsaved
            last = args.steps is not None and step + 1 >= args.steps
            if rank == 0:
                waited_s = stream.stats().waited_s
                print(f"step {step} loss {loss:.6f} waited {waited_s:.2f} s", flush=True)
            unsaved = not last and (step + 1) % args.checkpoint_every != 0
            if args.checkpoint and not unsaved:
                save_checkpoint(args.checkpoint, model, optimizer, stream)
            return not last

        with ExitStack() as around:
            timer = None
            if args.timings:
                plain = model.module if isinstance(model, DistributedDataParallel) else model
                assert isinstance(plain, TinyVLM)
                path = f"{args.timings}-rank{rank}.jsonl"
                timer = around.enter_context(CostTimer(path, vision=plain.vision))
            train(model, optimizer, stream, after_step=after_step, timer=timer)
        if args.checkpoint and unsaved:  # the data ended before --steps
            save_checkpoint(args.checkpoint, model, optimizer, stream)


def _model(args: argparse.Namespace, sizes: ModelSizes) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = ModelOptions(
        attention=args.attention,
        compile=args.compile,
        recompute=args.recompute,
        max_patches=args.max_patches,
        dummy_image=args.dummy_image,
    )
    plain = build_model(sizes, options).to(device=args.device, dtype=getattr(torch, args.dtype))
    model = parallel(plain, args.parallel)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


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
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument(
        "--attention",
        choices=["auto", "flash", "mask", "segments"],
        default="auto",
        help="auto: flash where it runs, else SDPA segment by segment, or where compiled by a mask",
    )
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        default="",
        metavar="BACKEND",
        help="torch.compile the vision blocks, with dynamic shapes",
    )
    parser.add_argument(
        "--recompute",
        choices=["none", "selective", "full"],
        default="none",
        help="activations that are computed again in the backward pass",
    )
    parser.add_argument(
        "--max-patches", type=int, default=0, help="of images that are encoded together; 0: all"
    )
    parser.add_argument(
        "--dummy-image",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the vision tower without images, too",
    )
    parser.add_argument(
        "--timings", metavar="FILE", help="write FILE-rank0.jsonl, ... for dataservice fit-cost"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
