"""What the examples of the trainers' libraries share: arguments, the stream, the tiny model.

Invariants: a step prints one line, with the loss of all ranks, the same in a run that was resumed;
the model takes tensors by name, as libraries call models.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from dataservice.wire.messages import SessionOpened
from trainer_client import MicroBatch, PackStream, ParallelLayout, VisionInfo
from trainer_client.examples.train_tiny_vlm import ModelSizes, build_model

TENSORS = (
    "input_ids",
    "labels",
    "position_ids",
    "cu_seqlens",
    "doc_ids",
    "pixel_values",
    "image_grid_thw",
)


def arguments(description: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--endpoint", required=True, help="coordinator, host:port")
    parser.add_argument("--job", default="tiny-vlm")
    parser.add_argument("--micro-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="stop after this many in all")
    parser.add_argument("--checkpoint", help="folder to resume from, if it is there, and to write")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--ranks", type=int, default=1, help="where the script starts them itself")
    return parser.parse_args(argv)


def open_stream(args: argparse.Namespace, layout: ParallelLayout) -> PackStream:
    return PackStream(args.endpoint, job=args.job, layout=layout, micro_steps=args.micro_steps)


def describe(args: argparse.Namespace, layout: ParallelLayout) -> SessionOpened:
    """What the packs look like, from a session of its own: a real trainer knows its model."""
    with open_stream(args, layout) as stream:
        return stream.open()


def tensors(batch: MicroBatch) -> dict[str, Tensor]:
    """A micro-batch as the keyword arguments of `TensorVLM`."""
    return {name: batch[name] for name in TENSORS}


class TensorVLM(nn.Module):
    """The tiny model, called with tensors by name; float64, so that equal runs print equal."""

    def __init__(self, info: SessionOpened) -> None:
        super().__init__()
        self.model = build_model(ModelSizes.of(info, dim=32, vision_dim=16, layers=1)).double()
        self.vision_info = VisionInfo.of(info)

    def forward(self, **named: Tensor) -> Tensor:
        """Sum of the token losses."""
        batch = MicroBatch(named)
        batch.vision = self.vision_info
        loss: Tensor = self.model(batch)
        return loss


def report(step: int, loss: Any) -> None:
    value = loss.item() if isinstance(loss, torch.Tensor) else loss
    print(f"step {step} loss {value:.10f}", flush=True)
