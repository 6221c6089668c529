"""Lightning: what it reads ahead does not count, and its checkpoints go on where they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_examples import (
    CUT,
    PACKS,
    STEPS,
    arguments,
    expected_losses,
    in_this_process,
    losses,
)

from dataservice.errors import ConfigError, ResumeRefused
from trainer_client import MicroBatch, PackStream, ParallelLayout

pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_run_that_was_cut_gives_what_one_run_gives(endpoint: str, tmp_path: Path) -> None:
    expected = expected_losses(endpoint, 2)
    words = [*arguments("train_lightning", endpoint, tmp_path), "--checkpoint-every", str(CUT)]
    output = in_this_process("train_lightning", [[*words, "--steps", str(n)] for n in (CUT, STEPS)])
    assert losses(output) == pytest.approx(expected, abs=1e-9)


def fit(endpoint: str, folder: Path, *, last_step: int, **settings: Any) -> list[int]:
    """Trains a module that reads the number of steps early, as schedulers do; packs it saw."""
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    from trainer_client.adapters.lightning import PackDataModule

    seen: list[int] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: MicroBatch, _number: int) -> Any:
            seen.extend(batch.meta["pack_numbers"])
            return self.weight * 0

        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == last_step
            return torch.optim.SGD(self.parameters(), lr=0.1)

    stream = PackStream(endpoint, job="any", layout=ParallelLayout(), micro_steps=2)
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = Trainer(
        **{
            "max_steps": last_step,
            "accumulate_grad_batches": 2,
            "callbacks": [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        | settings
    )
    with stream:
        data = PackDataModule(stream, lambda batch: batch)
        trainer.fit(Module(), datamodule=data, ckpt_path=ckpt_path)
    return seen


def test_a_resumed_run_saves_nothing_inside_a_step(endpoint: str, tmp_path: Path) -> None:
    from pytorch_lightning.callbacks import ModelCheckpoint

    saved: list[Path] = []
    for last_step in (2, 3):
        folder = tmp_path / str(last_step)
        keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last=True)
        ckpt_path = saved[0] if saved else None
        fit(endpoint, folder, last_step=last_step, ckpt_path=ckpt_path, callbacks=[keep])
        saved += sorted(folder.glob("*.ckpt"))
    states = [torch.load(path, weights_only=False)["PackDataModule"] for path in saved]
    assert {state["stream"]["micro_step"] for state in states} == {0}


def test_the_state_is_of_what_was_trained(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit(endpoint, tmp_path, last_step=3) == [0, 1, 2, 3, 4, 5]
    path = tmp_path / "epoch=0-step=2.ckpt"
    saved = torch.load(path, weights_only=True)["PackDataModule"]["stream"]
    assert saved["cursor"]["next_pack"] == [4], "the third step's first batch was read ahead"
    caplog.set_level("INFO")
    assert fit(endpoint, tmp_path, last_step=4, ckpt_path=str(path)) == [4, 5, 6, 7]
    assert "the stream goes on at step 2" in caplog.text


def test_more_steps_than_there_is_data_end(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit(endpoint, tmp_path, last_step=50, callbacks=[], enable_checkpointing=False) == list(
        range(PACKS)
    )
    assert f"the data has ended at step {PACKS // 2}" in caplog.text


def test_a_checkpoint_of_other_data_is_refused(endpoint: str, tmp_path: Path) -> None:
    fit(endpoint, tmp_path, last_step=1)
    path = tmp_path / "epoch=0-step=1.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["PackDataModule"]
    torch.save(checkpoint, path)
    with pytest.raises(ResumeRefused, match="does not say where the data was"):
        fit(endpoint, tmp_path, last_step=2, ckpt_path=str(path))


def test_another_accumulation_is_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches is 3"):
        fit(endpoint, tmp_path, last_step=2, accumulate_grad_batches=3)
