"""Megatron's external loader: who reads, that readers agree, and its checkpoints resumed.

Run as a script it is one of two ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.trainer_examples import (
    CUT,
    ROOT,
    STEPS,
    arguments,
    expected_losses,
    in_one_process,
    launched,
    losses,
)

from trainer_client.testing import FakeService, synthetic_packs

if importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def test_two_ranks_then_one_give_what_one_run_gives(endpoint: str, tmp_path: Path) -> None:
    expected = expected_losses(endpoint, 4)
    first = launched("train_megatron", endpoint, tmp_path, "--steps", str(CUT))
    saved = sorted(path.name for path in tmp_path.rglob("train_dataloader*"))
    assert saved == ["train_dataloader_dprank000.pt", "train_dataloader_dprank001.pt"]
    words = arguments("train_megatron", endpoint, tmp_path)
    second = in_one_process(
        "train_megatron", [[*words, "--steps", str(STEPS), "--micro-steps", "4"]]
    )
    assert losses(first + second) == pytest.approx(expected, abs=1e-9)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, by "tensor", "pipeline" and "data"."""
    folder = tmp_path_factory.mktemp("megatron")
    with FakeService(synthetic_packs(8)) as service:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), service.endpoint, str(folder)],
                env=os.environ
                | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
                | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            )
            for rank in range(2)
        ]
        try:
            assert [process.wait(timeout=100) for process in processes] == [0, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_one_tensor_parallel_rank_reads_for_both(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["tensor"] == list(range(8))
    assert ranks[1]["tensor"] is None


def test_first_and_last_stage_read_the_same(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["pipeline"] == ranks[1]["pipeline"] == list(range(8))


def test_data_parallel_ranks_read_different_packs(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["data"] + ranks[1]["data"] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_state_goes_on_through_megatrons_iterator(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["resumed"] == [4, 5, 6, 7]


def rank_main(rank: int, endpoint: str, folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunDataIterator

    from trainer_client.adapters.megatron_loader import make_loader

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    seen: dict[str, list[int] | None] = {}
    state = None
    for name, sizes in {
        "tensor": {"tensor_model_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "data": {},
        "resumed": {"tensor_model_parallel_size": 2},
    }.items():
        parallel_state.initialize_model_parallel(**sizes)
        loader = make_loader(
            endpoint,
            job="megatron",
            micro_steps=1,
            convert=lambda batch: batch.meta["pack_numbers"],
        )
        seen[name] = None
        if loader is not None:
            if name == "resumed":
                loader.restore_state(state)
            numbers: list[int] = []
            iterator = RerunDataIterator(loader)
            try:
                while True:
                    numbers += next(iterator)
                    if name == "tensor" and len(numbers) == 4:
                        state = json.loads(json.dumps(iterator.iterable.save_state()))
            except StopIteration:
                seen[name] = numbers
            dist.barrier()
            loader.stream.close()
        else:
            dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
