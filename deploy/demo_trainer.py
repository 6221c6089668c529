"""One rank of the demo's trainer: the example's model and loop, with a log of what it was given."""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.examples.train_tiny_vlm import ModelSizes, build_model, train


def logged(batches: Iterable[MicroBatch], path: Path) -> Iterator[MicroBatch]:
    """Passes batches on and writes one JSON line for each."""
    with path.open("w") as log:
        for batch in batches:
            meta = batch.meta
            names = ("step", "micro_step", "dp_rank", "pack_ids", "sample_keys")
            line = {name: meta[name] for name in (*names, "holes", "waited_s")}
            line["tokens"] = int((batch["doc_ids"] >= 0).sum())
            line["num_images"] = len(batch["image_grid_thw"])
            log.write(json.dumps(line) + "\n")
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--micro-steps", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with PackStream(
        args.endpoint,
        job=args.job,
        layout=ParallelLayout.data_parallel(rank, dist.get_world_size()),
        micro_steps=args.micro_steps,
    ) as stream:
        info = stream.open()
        model = build_model(ModelSizes.of(info, dim=32, layers=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def after_step(step: int, loss: float) -> bool:
            if rank == 0 and step % 10 == 0:
                print(f"  step {step}: loss {loss:.3f}", flush=True)
            return True

        train(
            DistributedDataParallel(model),
            optimizer,
            logged(stream, args.log_dir / f"rank{rank}.jsonl"),
            after_step=after_step,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
