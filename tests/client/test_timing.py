"""What the timer writes, on a clock that only the model's own parts move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import run
from torch import Tensor, nn

from trainer_client import cost_terms, timing
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.testing import FAKE_INFO, synthetic_packs
from trainer_client.timing import CostTimer
from trainer_client.vision import chunked_forward


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Spend(torch.autograd.Function):
    """Lets time pass, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        ctx.save_for_backward(x)  # so that a recomputation comes as far as here
        clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


class Vision(nn.Module):
    """1 s a call and `per_patch_s` a patch, twice as long in the backward pass."""

    def __init__(self, clock: Clock, per_patch_s: float = 0.0, per_square_s: float = 0.0) -> None:
        super().__init__()
        self.clock, self.per_patch_s, self.per_square_s = clock, per_patch_s, per_square_s
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        sizes = grid.prod(dim=1)
        patch_s = self.per_patch_s * int(sizes.sum()) + self.per_square_s * int((sizes**2).sum())
        spent = Spend.apply(patches * self.weight, self.clock, 1.0 + patch_s, 2 * (1.0 + patch_s))
        return spent.view(len(patches) // 4, -1)


class Model(nn.Module):
    def __init__(self, vision: Vision, *, max_patches: int = 10_000, recompute: bool = False):
        super().__init__()
        self.vision, self.weight = vision, nn.Parameter(torch.ones(1))
        self.max_patches, self.recompute = max_patches, recompute

    def forward(self, batch: MicroBatch, language_s: float) -> Tensor:
        patches, grid = batch["pixel_values"].double(), batch["image_grid_thw"]
        images = chunked_forward(
            self.vision, patches, grid, max_patches=self.max_patches, recompute=self.recompute
        )
        assert isinstance(images, Tensor)
        x = images.sum() + self.weight.sum()
        return Spend.apply(x, self.vision.clock, language_s, 3 * language_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def batches(count: int, *, seed: int = 0, image_share: float = 1.0) -> list[MicroBatch]:
    return [
        build_micro_batch(
            [(pack.arrays, pack.meta)],
            meta={"step": i, "micro_step": 0, "dp_rank": 3},
            is_last_micro_step=True,
            vision=VisionInfo.of(FAKE_INFO),
        )
        for i, pack in enumerate(synthetic_packs(count, seed=seed, image_share=image_share))
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("image_share", "recompute"), [(1.0, False), (1.0, True), (0.0, False)])
def test_parts_are_told_apart(
    clock: Clock, tmp_path: Path, image_share: float, recompute: bool
) -> None:
    made = batches(4, image_share=image_share)
    model = Model(Vision(clock), max_patches=1, recompute=recompute)
    with CostTimer(str(tmp_path / "log"), vision=model.vision, skip=1) as timer:
        for batch in made:
            clock.now += 100.0  # waiting for data
            with timer.micro_batch(batch):
                model(batch, 5.0).backward()
    rows = rows_of(tmp_path / "log")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, batch in zip(rows, made[1:], strict=True):
        calls = max(1, len(batch["image_grid_thw"]))
        again = calls if recompute else 0
        assert row == {
            **cost_terms(batch),
            "step": batch.step,
            "micro_step": 0,
            "dp_rank": 3,
            "ms": pytest.approx(1e3 * (20 + 3 * calls + again)),
            "vision_ms": pytest.approx(1e3 * (3 * calls + again)),
            "language_ms": pytest.approx(20e3),
        }


def test_a_frozen_encoder_has_no_backward(clock: Clock, tmp_path: Path) -> None:
    model = Model(Vision(clock))
    model.vision.requires_grad_(False)
    (batch,) = batches(1)
    with CostTimer(str(tmp_path / "log"), vision=model.vision, skip=0) as timer:
        with timer.micro_batch(batch):
            model(batch, 5.0).backward()
    (row,) = rows_of(tmp_path / "log")
    assert (row["vision_ms"], row["language_ms"]) == (1e3, 20e3)


def test_what_failed_leaves_no_row_and_the_model_is_left_as_it_was(
    clock: Clock, tmp_path: Path
) -> None:
    model = Model(Vision(clock))
    first, second = batches(2)
    with CostTimer(str(tmp_path / "log"), vision=model.vision, skip=0) as timer:
        with pytest.raises(RuntimeError, match="out of memory"), timer.micro_batch(first):
            raise RuntimeError("out of memory")
        model(first, 5.0).backward()  # outside: not timed
        with timer.micro_batch(second):
            model(second, 5.0).backward()
    model(second, 5.0).backward()
    assert [row["step"] for row in rows_of(tmp_path / "log")] == [1]
    assert not model.vision._forward_hooks
    assert not model.vision._forward_pre_hooks


def test_its_log_is_what_fit_cost_reads(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(Vision(clock, per_patch_s=1e-4, per_square_s=1e-6))
    path = tmp_path / "timings.jsonl"
    with CostTimer(str(path), vision=model.vision) as timer:
        for batch in batches(260):
            language_s = 5e-6 * cost_terms(batch)["length_squared"]
            with timer.micro_batch(batch):
                model(batch, language_s).backward()
    assert run("fit-cost", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_rows"] == 250
    assert found["patches_s"] == pytest.approx(3e-4, rel=1e-3)
    assert found["patches_squared_s"] == pytest.approx(3e-6, rel=1e-3)
    assert found["length_squared_s"] == pytest.approx(2e-5, rel=1e-3)
    assert found["constant_s"] == pytest.approx(3.0, rel=1e-3)


def test_rows_wait_for_the_device_without_holding_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[bool] = []

    class Slow(timing._Clock):
        """Of a device that is done when told so."""

        def passed(self, mark: Any) -> bool:
            return bool(passed)

    monkeypatch.setattr(timing, "_clock", lambda _batch: Slow())
    monkeypatch.setattr(timing, "BEHIND", 3)
    (batch,) = batches(1)
    timer = CostTimer(str(tmp_path / "log"), vision=Vision(Clock()), skip=0)

    def rows_after_one_more() -> int:
        with timer.micro_batch(batch):
            pass
        timer._log.flush()
        return len(rows_of(tmp_path / "log"))

    assert [rows_after_one_more() for _ in range(5)] == [0, 0, 0, 1, 2]
    assert all("pixel_values" not in timed.batch for timed in timer._waiting)
    passed.append(True)
    assert rows_after_one_more() == 6
    passed.clear()
    assert rows_after_one_more() == 6
    timer.close()
    assert len(rows_of(tmp_path / "log")) == 7
