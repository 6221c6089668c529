"""Hugging Face's Trainer: as plain torch, also resumed from its checkpoint on other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer_examples import (
    CUT,
    STEPS,
    arguments,
    expected_losses,
    in_this_process,
    launched,
    losses,
)

from dataservice.errors import ConfigError, ResumeRefused
from trainer_client import PackStream, ParallelLayout
from trainer_client.examples.tiny_trainers import tensors

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_two_ranks_then_one_give_what_one_run_gives(endpoint: str, tmp_path: Path) -> None:
    expected = expected_losses(endpoint, 4)
    first = launched("train_hf_trainer", endpoint, tmp_path, "--steps", str(CUT))
    (folder,) = (tmp_path / "hf").glob("checkpoint-*")
    kept = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]
    assert kept["PackCursor"]["attributes"]["cursor"]["cursor"]["step"] == CUT
    words = arguments("train_hf_trainer", endpoint, tmp_path)
    second = in_this_process(
        "train_hf_trainer", [[*words, "--steps", str(STEPS), "--micro-steps", "4"]]
    )
    assert losses(first + second) == pytest.approx(expected, abs=2e-6)


def trainer_of(endpoint: str, folder: Path, **settings: Any) -> Any:
    from transformers import TrainingArguments

    from trainer_client.adapters.huggingface import PackTrainer
    from trainer_client.examples.tiny_trainers import describe
    from trainer_client.examples.train_hf_trainer import MeanLossVLM, Report

    class Args:
        job, micro_steps = "hf", 2

    args: Any = Args()
    args.endpoint = endpoint
    settings = {
        "output_dir": str(folder),
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        "ignore_data_skip": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | settings
    stream = PackStream(endpoint, job="hf", layout=ParallelLayout(), micro_steps=2)
    return PackTrainer(
        MeanLossVLM(describe(args, ParallelLayout())),
        TrainingArguments(**settings),
        stream=stream,
        convert=tensors,
        callbacks=[Report()],
    ), stream


@pytest.mark.parametrize(
    ("setting", "value"),
    [("ignore_data_skip", False), ("max_steps", -1), ("average_tokens_across_devices", False)],
)
def test_settings_that_lose_data_are_refused(
    endpoint: str, tmp_path: Path, setting: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=setting):
        trainer_of(endpoint, tmp_path, **{setting: value})


@pytest.mark.parametrize("steps", [1, 3])
def test_another_accumulation_is_refused(endpoint: str, tmp_path: Path, steps: int) -> None:
    trainer, stream = trainer_of(endpoint, tmp_path, gradient_accumulation_steps=steps)
    with stream, pytest.raises(ConfigError, match="gradient_accumulation_steps is"):
        trainer.train()


def test_a_checkpoint_without_the_cursor_is_refused(endpoint: str, tmp_path: Path) -> None:
    trainer, stream = trainer_of(endpoint, tmp_path, save_steps=1)
    with stream:
        trainer.train()
    path = tmp_path / "checkpoint-1"
    state = json.loads((path / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["PackCursor"]
    (path / "trainer_state.json").write_text(json.dumps(state))
    again, stream = trainer_of(endpoint, tmp_path)
    with stream, pytest.raises(ResumeRefused, match="without PackTrainer"):
        again.train(resume_from_checkpoint=str(path))


def test_callbacks_may_be_restored_too_and_the_data_ends(endpoint: str, tmp_path: Path) -> None:
    trainer, stream = trainer_of(endpoint, tmp_path, save_steps=1)
    with stream:
        trainer.train()
    again, stream = trainer_of(
        endpoint, tmp_path, restore_callback_states_from_checkpoint=True, max_steps=25
    )
    with stream:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert again.state.global_step == 20, "40 packs, two a step"
