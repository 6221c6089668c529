"""Ray Train on a `PackStream`: where a worker stands, and the state beside its checkpoints.

Invariants: called inside `train_loop_per_worker`; each of Ray Train's workers is one data-parallel
rank; the state is the same on all of them, so rank 0 writes it and all read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import ray.train

from dataservice.errors import ResumeRefused
from trainer_client.layout import ParallelLayout
from trainer_client.stream import PackStream

STATE_FILE = "pack_stream.json"


def worker_layout() -> ParallelLayout:
    """Of this worker; for more kinds of parallelism make a ParallelLayout of the world rank."""
    context = ray.train.get_context()
    return ParallelLayout.data_parallel(context.get_world_rank(), context.get_world_size())


def save_state(stream: PackStream, folder: str | Path) -> None:
    """Write the state into the folder that `Checkpoint.from_directory` takes."""
    (Path(folder) / STATE_FILE).write_text(json.dumps(stream.state_dict()))


def load_state(stream: PackStream, folder: str | Path) -> None:
    """Read it from the folder of `ray.train.get_checkpoint().as_directory()`."""
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        raise ResumeRefused(
            f"{path} is missing: the checkpoint does not say where the data was; write it with "
            "trainer_client.adapters.ray_train.save_state"
        )
    stream.load_state_dict(json.loads(path.read_text()))
