"""`dataservice bench`: what is measured on small data, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.demo_config import demo_settings, write_config

from dataservice.actors import measuring
from dataservice.actors.measuring import Built
from dataservice.cli.bench_run import need_of
from dataservice.config import load_config
from dataservice.core.packspec import PackSpec
from dataservice.errors import ConfigError
from dataservice.indexing import scan_lazy_index, update_index


def settings_of(tmp_path: Path, **sections: dict[str, Any]) -> Path:
    return write_config(tmp_path, demo_settings(tmp_path, **sections))


def test_what_is_needed_follows_from_core_seconds_and_the_gpus_time() -> None:
    packs = Built(
        packs=100,
        images=400,
        seconds=10.0,
        cpu_s=16.0,
        decode_s=12.0,
        threads=2,
        pack_bytes=100 * 5_000_000,
        read_bytes=100 * 2_000_000,
        holes=0,
        again=False,
    )
    need = need_of(packs, 0.5)  # two packs a second, each of 0.16 core-seconds
    assert need.cores == pytest.approx(2 * 0.16 / 0.8)
    assert need.workers == pytest.approx(2 / 10 / 0.8)
    assert need.origin_bytes_per_s == pytest.approx(4e6)
    assert need.trainer_bytes_per_s == pytest.approx(1e7)


def test_measures_the_packs_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings_of(tmp_path)
    assert run("bench", config, "--seconds", 1.0, "--json", "--pack-s", 0.01, "--gpus", 1000) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packs"] > 10
    assert found["packs_per_core_s"] > 0
    assert found["images_per_s"] > 0
    assert found["decode_threads"] == 1
    assert found["pack_bytes"] > 4 * 3 * 2048
    assert found["origin"]["url"].startswith(str(Path(__file__).parent.parent))
    assert found["origin"]["read_bytes"] > 0
    assert found["cache"]["written_bytes"] > 0
    (need,) = found["needs"]
    assert need["all_workers"] >= need["workers"] * 1000 > need["all_workers"] - 1
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "state").exists()

    assert run("bench", config, "--seconds", 1.0, "--gpus", 8) == 0
    out = capsys.readouterr().out
    for words in ("one core", "packs/s", "of 8 GPUs", "0.25", "busy 80% of their time"):
        assert words in out


def test_the_packs_are_those_of_the_plan_without_padding(tmp_path: Path) -> None:
    config = load_config(str(settings_of(tmp_path)))
    update_index(config)
    specs = measuring.planned(config, most_s=20.0)
    ids = [spec.pack_id for spec in specs]
    assert len(ids) == len(set(ids)) > 50
    assert not any(pack_id.startswith("pad.") for pack_id in ids)
    assert all(isinstance(spec, PackSpec) and spec.items for spec in specs)


def test_where_nothing_is_staged_no_disk_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings_of(tmp_path, staging={"cache_dir": None})
    assert run("bench", config, "--seconds", 1.0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cache"] is None


def test_segregated_plans_are_measured_too(tmp_path: Path) -> None:
    kinds = {
        "text": {"micro_steps": 1, "packs_per_cell": 2},
        "vision": {"micro_steps": 3, "packs_per_cell": 1},
    }
    config = load_config(str(settings_of(tmp_path, plan={"segregate": kinds})))
    update_index(config)
    specs = measuring.planned(config, most_s=5.0)
    assert {spec.num_patches > 0 for spec in specs} == {True, False}


def test_lazy_indexes_are_counted_as_far_as_needed(tmp_path: Path) -> None:
    settings = demo_settings(tmp_path) | {"index": "lazy"}
    config = load_config(str(write_config(tmp_path, settings)))
    scan_lazy_index(config)
    assert len(measuring.planned(config, most_s=1.0)) > 10


def test_a_plan_without_packs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(settings_of(tmp_path)))
    update_index(config)
    monkeypatch.setattr(measuring, "_steps", lambda *_: iter(()))
    with pytest.raises(ConfigError, match="no pack to build"):
        measuring.planned(config, most_s=1.0)
