"""DeepSpeed: an engine on the CPU, and a pipeline that reads by `data_iter`.

Run as a script it is the pipeline's process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import run_trainer
from support.trainer_examples import (
    CUT,
    PACKS,
    STEPS,
    arguments,
    expected_losses,
    losses,
    run,
)

from trainer_client.testing import FakeService, synthetic_packs

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)


PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
NEXT = "the pipeline"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the example and the pipeline printed, in one process, and what the first should."""
    with FakeService(synthetic_packs(PACKS)) as service:
        words = arguments("train_deepspeed", service.endpoint, tmp_path_factory.mktemp("deepspeed"))
        runs = json.dumps([[*words, "--steps", str(n)] for n in (CUT, STEPS)])
        command = [sys.executable, __file__, service.endpoint, runs]
        example, pipeline = run(command, PYTHONPATH=os.pathsep.join(PATHS)).split(NEXT)
        expected = expected_losses(service.endpoint, 2)
    return {"example": example, "pipeline": pipeline, "expected": expected}


def test_a_run_that_was_cut_gives_what_one_run_gives(outputs: dict[str, Any]) -> None:
    expected = pytest.approx(outputs["expected"], abs=1e-5)
    assert losses(outputs["example"]) == expected, "float32"


def test_a_pipeline_reads_the_iterator(outputs: dict[str, Any]) -> None:
    output = outputs["pipeline"]
    assert losses(output) == pytest.approx({0: 5.5451774445, 1: 5.5451774445}), (
        "all classes alike: ln 256 a token, whatever the number of micro-batches and tokens"
    )
    assert "more than 2 micro-batches" in output


def pipeline(endpoint: str) -> None:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from dataservice.errors import ConfigError
    from trainer_client import MicroBatch, PackStream, ParallelLayout
    from trainer_client.adapters.deepspeed import PackIterator

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": "0"})
    deepspeed.init_distributed("gloo", verbose=False)

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, 256))

        def forward(self, ids: Any) -> Any:
            return ids[0, :, None].float() * self.weight

    def loss_of(logits: Any, labels: Any) -> Any:
        labels, scale = labels
        lost = torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")
        return lost * scale[0]

    def convert(batch: MicroBatch, scale: float) -> Any:
        labels = (batch["labels"][None], torch.tensor([scale]))
        return batch["input_ids"][None], labels

    for micro_steps in (2, 3):
        stream = PackStream(endpoint, job="pipe", layout=ParallelLayout(), micro_steps=micro_steps)
        model = PipelineModule([Head()], num_stages=1, loss_fn=loss_of)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
        )
        with stream:
            packs = PackIterator(stream, engine, convert)
            try:
                for step in range(2):
                    print(f"step {step} loss {engine.train_batch(data_iter=packs).item()}")
            except ConfigError as error:
                print(error)


if __name__ == "__main__":
    run_trainer.main("train_deepspeed", json.loads(sys.argv[2]))
    print(NEXT)
    pipeline(sys.argv[1])
