"""torchtitan: its own Trainer on the CPU, shifted labels, a loader that ends and resumes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_examples import CUT, PACKS, STEPS, arguments, in_one_process, losses

from dataservice.errors import ConfigError
from trainer_client import PackStream, ParallelLayout

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


def test_the_trainer_resumes_on_its_own_checkpoint(endpoint: str, tmp_path: Path) -> None:
    words = arguments("train_torchtitan", endpoint, tmp_path)
    runs = [
        [*words, "--steps", str(STEPS), "--checkpoint-every", str(CUT)],
        [*words[:-2], "--steps", str(PACKS)],
    ]
    whole, endless = in_one_process("train_torchtitan", runs).split("step 0 loss")[1:]
    shutil.rmtree(tmp_path / "torchtitan" / "checkpoint" / f"step-{STEPS}")
    rest = losses(in_one_process("train_torchtitan", runs[:1]))
    assert list(rest) == list(range(CUT, STEPS))
    expected = losses("step 0 loss" + whole)
    assert rest == pytest.approx({step: expected[step] for step in rest}, abs=1e-6)
    assert "Ran out of data" in endless
    assert max(losses("step 0 loss" + endless)) == PACKS // 2 - 1


def loader(endpoint: str, *, seq_len: int = 64, local_batch_size: int = 1) -> Any:
    from trainer_client.adapters.torchtitan import PackDataLoader, vision_batch

    config = PackDataLoader.Config(
        endpoint=endpoint, job="titan", micro_steps=2, convert=vision_batch
    )
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        snapshot_every_n_steps=2,
    )


def test_labels_are_shifted_inside_documents(endpoint: str) -> None:
    with PackStream(endpoint, job="titan", layout=ParallelLayout(), micro_steps=2) as stream:
        batches = list(stream)
    packs = loader(endpoint)
    converted = list(packs)
    packs.close()
    assert len(converted) == len(batches) == PACKS
    for batch, (inputs, labels) in zip(batches, converted, strict=True):
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (1, 64)
        assert inputs["pixel_values"].dtype == torch.bfloat16
        assert len(inputs["grid_thw"]) == len(batch["image_grid_thw"])
        bounds = batch["cu_seqlens"].tolist()
        for start, stop in itertools.pairwise(bounds):
            assert torch.equal(labels[0, start : stop - 1], batch["labels"][start + 1 : stop])
            assert labels[0, stop - 1] == -100


def test_a_state_is_there_before_the_first_batch_and_resumes(endpoint: str) -> None:
    first = loader(endpoint)
    assert list(first.state_dict()) == ["pack_stream"], "checkpoints load into keys that exist"
    batches = iter(first)
    expected = [next(batches) for _ in range(4)]
    first.close()
    again = loader(endpoint)
    again.load_state_dict({})
    batches = iter(again)
    next(batches)
    with pytest.raises(ConfigError, match="global_batch_size"):
        again.state_dict()
    next(batches)
    state = again.state_dict()
    again.close()
    resumed = loader(endpoint)
    resumed.load_state_dict(state)
    inputs, labels = next(iter(resumed))
    resumed.close()
    assert torch.equal(inputs["input"], expected[2][0]["input"])
    assert torch.equal(labels, expected[2][1])


def test_sizes_that_do_not_fit_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="packs_per_cell"):
        loader(endpoint, local_batch_size=2)
    packs = loader(endpoint, seq_len=128)
    with pytest.raises(ConfigError, match="seq_len is 128"):
        next(iter(packs))
    packs.close()
