"""The example trainer's switches: losses and weights are the same under each, on two ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dataservice.errors import ConfigError
from trainer_client import PackStream, ParallelLayout
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.examples import train_tiny_vlm
from trainer_client.examples.tiny_vlm import ModelOptions, ModelSizes, attention_kind, build_model
from trainer_client.testing import FAKE_INFO, FakeService, synthetic_packs

RANKS, MICRO_STEPS, STEPS = 2, 2, 4
PACKS = synthetic_packs(RANKS * MICRO_STEPS * STEPS, seed=3, image_share=0.5)
SIZES = {"dim": 16, "vision_dim": 16, "vision_layers": 2}
GROUPS = "--max-patches 40"
"""Of at most so many patches: a micro-batch here has 40 to 200."""
OPTIONS = {
    "plain": "",
    "mask": "--attention mask",
    "selective": "--recompute selective",
    "full": "--recompute full",
    "groups": GROUPS,
    "compile": "--compile aot_eager",
    "fsdp": "--parallel fsdp",
    "fsdp groups": f"--parallel fsdp {GROUPS}",
    "fsdp full groups": f"--parallel fsdp --recompute full {GROUPS}",
    "fsdp selective compile": "--parallel fsdp --recompute selective --compile aot_eager",
}
COMMON = f"--dtype float64 --job tiny --micro-steps {MICRO_STEPS} --lr 1e-2"


def arguments(endpoint: str, options: str) -> Any:
    line = f"--endpoint {endpoint} {COMMON} {options}"
    return train_tiny_vlm._arguments(line.split())


def one_run(endpoint: str, rank: int, options: str) -> dict[str, Any]:
    args = arguments(endpoint, options)
    stream = PackStream(
        endpoint,
        job="tiny",
        layout=ParallelLayout.data_parallel(rank, RANKS),
        micro_steps=MICRO_STEPS,
    )
    losses: list[float] = []
    without: list[int] = []

    def watched(batches: Any) -> Any:
        for batch in batches:
            without.append(batch.meta["ranks_without_images"])
            yield batch

    def after_step(_step: int, loss: float) -> bool:
        losses.append(loss)
        return True

    with stream:
        model, optimizer = train_tiny_vlm._model(args, ModelSizes.of(stream.open(), **SIZES))
        train_tiny_vlm.train(model, optimizer, watched(stream), after_step=after_step)
    state = get_model_state_dict(model, options=train_tiny_vlm.WHOLE)
    weights = [value.flatten() for _, value in sorted(state.items())]
    flat = torch.cat(weights).tolist() if weights else []  # of FSDP, rank 0 alone has them
    return {"losses": losses, "weights": flat, "without": without}


def rank_main(rank: int, _ranks: int, endpoint: str, checkpoints: str) -> dict[str, Any]:
    found = {name: one_run(endpoint, rank, options) for name, options in OPTIONS.items()}
    whole, cut = f"{checkpoints}/whole", f"{checkpoints}/cut"
    for path, steps, options in (
        (whole, STEPS, ""),
        (cut, 2, "--parallel fsdp"),
        (cut, 3, ""),
        (cut, STEPS, "--parallel fsdp"),
    ):
        options += f" --checkpoint {path} --steps {steps}"
        train_tiny_vlm.run(arguments(endpoint, options))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    with FakeService(PACKS) as service:
        work = "client.test_train_options:rank_main"
        return run_ranks(work, RANKS, folder, service.endpoint, str(folder))


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_switch_changes_nothing(runs: list[dict[str, Any]], name: str) -> None:
    plain = runs[0]["plain"]
    assert len(plain["losses"]) == STEPS
    for rank in runs:
        assert rank[name]["losses"] == pytest.approx(plain["losses"], abs=1e-9)
    assert runs[0][name]["weights"] == pytest.approx(plain["weights"], abs=1e-9)


def test_single_ranks_had_no_image(runs: list[dict[str, Any]]) -> None:
    assert {0, 1} <= set(runs[0]["fsdp"]["without"])


@pytest.mark.usefixtures("runs")
def test_a_run_goes_on_under_the_other_parallelism(folder: Path) -> None:
    whole, cut = (torch.load(folder / name, weights_only=True) for name in ("whole", "cut"))
    assert whole["stream"]["cursor"] == cut["stream"]["cursor"]
    for name, value in whole["model"].items():
        assert torch.allclose(cut["model"][name], value, rtol=0, atol=1e-9), name


# ---- on one rank --------------------------------------------------------------------------------


def batch_of(pack: Any, info: Any = FAKE_INFO) -> MicroBatch:
    return build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VisionInfo.of(info),
    )


def test_without_a_dummy_image_the_tower_rests() -> None:
    text = next(pack for pack in PACKS if not pack.num_images)
    sizes = ModelSizes.of(FAKE_INFO, **SIZES)
    losses = []
    for dummy_image in (True, False):
        model = build_model(sizes, ModelOptions(dummy_image=dummy_image)).double()
        loss = model(batch_of(text))
        loss.backward()
        losses.append(loss.item())
        took_part = [parameter.grad is not None for parameter in model.vision.parameters()]
        assert all(took_part) if dummy_image else not any(took_part)
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_new_shapes_do_not_compile_anew() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build_model(ModelSizes.of(FAKE_INFO, **SIZES), ModelOptions(compile="eager")).double()
    batches = [batch_of(pack) for pack in PACKS if pack.num_images]
    shapes = {tuple(batch["image_grid_thw"].flatten().tolist()) for batch in batches}
    assert len(shapes) > 6
    for batch in batches:
        model(batch).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3


def test_tiles_are_cut_into_the_patches_of_their_squares() -> None:
    info = FAKE_INFO.__class__(
        **{name: getattr(FAKE_INFO, name) for name in FAKE_INFO.__slots__}
        | {"pack_length": 256, "tile": 8, "thumbnail": True, "tile_tokens": 4}
    )
    sizes = ModelSizes.of(info, **SIZES)
    assert (sizes.merge, sizes.temporal_patch, sizes.tile) == (2, 1, 8)
    model = build_model(sizes).double()
    tiles = torch.arange(3 * 64, dtype=torch.float64).view(1, 3, 8, 8)
    patches, grid = model._of_tiles(tiles, torch.ones(1, 3, dtype=torch.int64))
    assert grid.tolist() == [[1, 4, 4]]
    corners = [int(patch.view(3, 2, 2)[0, 0, 0]) for patch in patches]
    squares = itertools.product((0, 4), (0, 4), (0, 2), (0, 2))
    assert corners == [(top + y) * 8 + left + x for top, left, y, x in squares]
    (pack,) = synthetic_packs(1, image_share=1.0, info=info)
    model(batch_of(pack, info)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    odd = FAKE_INFO.__class__(
        **{name: getattr(info, name) for name in FAKE_INFO.__slots__} | {"tile_tokens": 3}
    )
    with pytest.raises(ConfigError, match=r"tile_tokens is 3: .* 4x4 patches of a tile; set a sq"):
        ModelSizes.of(odd)


def test_flash_is_refused_where_it_does_not_run() -> None:
    rows = torch.zeros(2, 2)
    assert attention_kind("auto", rows, compiled=False) == "segments"
    assert attention_kind("auto", rows, compiled=True) == "mask"
    with pytest.raises(ConfigError, match=r"flash needs CUDA, .* here are cpu and torch.float32"):
        attention_kind("flash", rows, compiled=False)


def test_timings_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with FakeService(PACKS) as service:
        log = tmp_path / "timings"
        train_tiny_vlm.main(["--endpoint", service.endpoint, "--timings", str(log)])
    lines = (tmp_path / "timings-rank0.jsonl").read_text().splitlines()
    assert len(lines) == len(PACKS) - 10
    assert all(json.loads(line)["vision_ms"] > 0 for line in lines)
