"""A DeepSpeed engine on a PackStream.

python -m trainer_client.examples.train_deepspeed --endpoint HOST:PORT --checkpoint DIR
"""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed as dist

from trainer_client import ParallelLayout
from trainer_client.adapters.deepspeed import load_checkpoint, loss_scale, save_checkpoint
from trainer_client.examples.tiny_trainers import (
    TensorVLM,
    arguments,
    describe,
    open_stream,
    report,
    tensors,
)


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with DeepSpeed.", argv)
    if "WORLD_SIZE" not in os.environ:  # alone, without its launcher
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": "0"})
    deepspeed.init_distributed("gloo", verbose=False)
    layout = ParallelLayout.data_parallel(dist.get_rank(), dist.get_world_size())
    model = TensorVLM(describe(args, layout)).float()  # DeepSpeed reduces no float64
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": args.micro_steps,
        },
    )
    with open_stream(args, layout) as stream:
        if args.checkpoint and os.path.isdir(args.checkpoint):
            load_checkpoint(engine, stream, args.checkpoint)
        if stream.open().first_step >= args.steps:
            return
        total = torch.zeros((), dtype=torch.float64)
        for batch in stream:
            loss = engine(**tensors(batch)) * loss_scale(engine, batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / args.micro_steps
            if not batch.is_last_micro_step:
                continue
            dist.all_reduce(total, dist.ReduceOp.SUM)
            if layout.rank == 0:
                report(batch.step, total / layout.dp_size)
            total, done = torch.zeros_like(total), batch.step + 1
            if args.checkpoint and (done == args.steps or done % args.checkpoint_every == 0):
                save_checkpoint(engine, stream, args.checkpoint)
            if done == args.steps:
                break


if __name__ == "__main__":
    try:
        main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
