"""Accelerate's loop on a PackStream: no adapter, only what to leave alone.

    python -m trainer_client.examples.train_accelerate --endpoint HOST:PORT --checkpoint DIR
    accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no -m trainer_client.examples.train_accelerate --endpoint HOST:PORT ...

`prepare` gets the model and the optimizer, never a DataLoader around the stream: Accelerate would
have rank 0 read for all, or each rank drop what it takes for the others' batches. The stream is
registered for checkpoints as it is; `Accelerator(gradient_accumulation_steps=1)`, since the stream
itself says where a step ends.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from accelerate import Accelerator

from trainer_client import ParallelLayout
from trainer_client.examples.tiny_trainers import (
    TensorVLM,
    arguments,
    describe,
    open_stream,
    report,
    tensors,
)


def main(argv: list[str] | None = None) -> None:
    args = arguments("Train a tiny model with Accelerate.", argv)
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    layout = ParallelLayout.data_parallel(accelerator.process_index, ranks)
    model = TensorVLM(describe(args, layout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    with open_stream(args, layout) as stream:
        accelerator.register_for_checkpointing(stream)
        if args.checkpoint and os.path.isdir(args.checkpoint):
            accelerator.load_state(args.checkpoint)
        if stream.open().first_step >= args.steps:
            return
        total = 0.0
        for batch in stream:
            last = batch.is_last_micro_step
            with nullcontext() if last else accelerator.no_sync(model):
                loss = model(**tensors(batch)) * ranks / max(1, batch.meta["loss_tokens"])
                accelerator.backward(loss)
            total += loss.detach()
            if not last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(total, "mean")
            if accelerator.is_main_process:
                report(batch.step, mean)
            total, done = 0.0, batch.step + 1
            if args.checkpoint and (done == args.steps or done % args.checkpoint_every == 0):
                accelerator.save_state(args.checkpoint)
            if done == args.steps:
                break


if __name__ == "__main__":
    main()
