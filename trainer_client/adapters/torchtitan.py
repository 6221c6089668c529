"""torchtitan's `BaseDataLoader` on a `PackStream`.

Invariants: labels are shifted here, inside their document, as torchtitan's losses expect; the
checkpoint holds one state for all ranks, so that another number of ranks can load it; the end of
the data is StopIteration, of which torchtitan makes `DataloaderExhaustedError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from dataservice.errors import ConfigError
from trainer_client.adapters.documents import shifted_labels
from trainer_client.batch import MicroBatch
from trainer_client.device import normalize
from trainer_client.layout import ParallelLayout
from trainer_client.stream import PackStream

Batch = tuple[dict[str, Any], torch.Tensor]


def text_batch(batch: MicroBatch) -> Batch:
    """`input`, `positions` and shifted labels, int64 [1, T], for a language model alone."""
    inputs = {"input": batch["input_ids"][None], "positions": batch["position_ids"][None]}
    return inputs, shifted_labels(batch)[None]


def vision_batch(batch: MicroBatch) -> Batch:
    """`text_batch`, and `pixel_values` [P, values] in bfloat16 with `grid_thw` int64 [N, 3]."""
    inputs, labels = text_batch(batch)
    inputs["pixel_values"] = normalize(batch, torch.bfloat16)
    inputs["grid_thw"] = batch["image_grid_thw"]
    return inputs, labels


class PackDataLoader(BaseDataLoader):
    """torchtitan's loader: set `Trainer.Config(dataloader=PackDataLoader.Config(endpoint=...))`.

    `micro_steps` is torchtitan's gradient accumulation, `global_batch_size / (local_batch_size *
    data-parallel ranks)`, with `local_batch_size=1`: a batch is one row of `packs_per_cell` packs,
    `seq_len` tokens together. torchtitan normalises by the labels of the whole step over all ranks,
    so it does not matter which rank computes which pack.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        endpoint: str = ""
        """Coordinator, "host:port"."""
        job: str = ""
        micro_steps: int = 1
        packs_per_cell: int = 1
        device: str = "cpu"
        """torchtitan moves the batches itself; "cuda" has them there before."""
        convert: Callable[[MicroBatch], Batch] = text_batch

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        """`sizes` differ between torchtitan's versions: tokenizer, seq_len, local_batch_size ..."""
        self._tokens = sizes.get("seq_len", sizes.get("num_tokens_per_batch"))
        if sizes.get("local_batch_size", 1) != 1:
            raise ConfigError(
                f"training.local_batch_size is {sizes['local_batch_size']}; set 1, and the packs "
                "of a batch by PackDataLoader.Config(packs_per_cell=...)"
            )
        self._convert, self._in_step = config.convert, False
        self._stream = PackStream(
            config.endpoint,
            job=config.job,
            layout=ParallelLayout.data_parallel(dp_rank, dp_world_size),
            micro_steps=config.micro_steps,
            packs_per_cell=config.packs_per_cell,
            device=config.device,
        )

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._stream:
            if self._tokens not in (None, len(batch["input_ids"])):
                raise ConfigError(
                    f"training.seq_len is {self._tokens}, a batch of the service has "
                    f"{len(batch['input_ids'])} tokens; set it to pack_length * packs_per_cell"
                )
            self._in_step = not batch.is_last_micro_step
            yield self._convert(batch)

    def state_dict(self) -> dict[str, Any]:
        """One text: distributed checkpoints load into keys that exist before the first batch."""
        if self._in_step:
            raise ConfigError(
                "torchtitan's step ends inside one of the stream's; set training.global_batch_size "
                "to micro_steps * data-parallel ranks"
            )
        return {"pack_stream": json.dumps(self._stream.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._stream.load_state_dict(json.loads(state_dict["pack_stream"]))

    def close(self) -> None:
        self._stream.close()
