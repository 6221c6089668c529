"""The example trainer: attention stays where it should, and a resumed run is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.examples.train_tiny_vlm import ModelSizes, TinyVLM, build_model, main
from trainer_client.testing import (
    FAKE_INFO,
    FakePack,
    FakeService,
    padding_pack,
    synthetic_packs,
)


def model() -> TinyVLM:
    sizes = ModelSizes.of(FAKE_INFO, dim=16, vision_dim=8)
    return build_model(sizes).double()


def batch_of(*packs: FakePack) -> MicroBatch:
    return build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VisionInfo.of(FAKE_INFO),
    )


def only_document(batch: MicroBatch, document: int) -> MicroBatch:
    batch["labels"] = torch.where(batch["doc_ids"] == document, batch["labels"], -100)
    return batch


def test_documents_and_images_do_not_see_each_other() -> None:
    pack = synthetic_packs(1, image_share=1.0)[0]
    assert pack.meta["num_docs"] >= 2
    tiny = model()
    before = tiny(only_document(batch_of(pack), 1)).item()
    changed = batch_of(pack)
    changed["input_ids"][0] = (changed["input_ids"][0] + 1) % 256
    first = int(changed["image_grid_thw"][changed["image_doc_ids"] == 0].prod(dim=1).sum())
    pixels = changed["pixel_values"].clone()
    pixels[:first] += 1
    changed["pixel_values"] = pixels
    assert tiny(only_document(changed, 1)).item() == pytest.approx(before, abs=1e-12)
    assert tiny(only_document(changed, 0)).item() != pytest.approx(
        tiny(only_document(batch_of(pack), 0)).item(), abs=1e-6
    )


def test_packs_in_one_cell_add_up() -> None:
    packs = synthetic_packs(3, seed=2)
    tiny = model()
    together = tiny(batch_of(*packs)).item()
    assert together == pytest.approx(sum(tiny(batch_of(pack)).item() for pack in packs), abs=1e-9)


def test_every_parameter_takes_part_without_images() -> None:
    tiny = model()
    tiny(batch_of(synthetic_packs(1, image_share=0.0)[0])).backward()
    assert all(parameter.grad is not None for parameter in tiny.parameters())
    assert all((p.grad == 0).all() for p in tiny.vision.parameters())


def test_padding_costs_nothing() -> None:
    assert model()(batch_of(padding_pack())).item() == 0.0


def test_resume_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    common = ["--micro-steps", "2", "--dtype", "float64", "--checkpoint"]
    with FakeService(synthetic_packs(11)) as service:
        endpoint = ["--endpoint", service.endpoint]
        main([*endpoint, *common, str(tmp_path / "whole"), "--steps", "6"])
        main([*endpoint, *common, str(tmp_path / "cut"), "--steps", "2"])
        main([*endpoint, *common, str(tmp_path / "cut"), "--steps", "6"])
        printed = capsys.readouterr().out.splitlines()
        main([*endpoint, *common, str(tmp_path / "cut"), "--steps", "6"])
        assert capsys.readouterr().out == "", "a finished run trains no more"
    losses = [line.split(" waited")[0] for line in printed]
    assert losses[:6] == losses[6:]
    whole, cut = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "cut"))
    assert whole["stream"] == cut["stream"]
    assert whole["stream"]["cursor"]["step"] == 6
    assert all(torch.equal(cut["model"][name], value) for name, value in whole["model"].items())
