"""`vision.mode: tiles` on the command line: index, plan and simulate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import run

Capture = pytest.CaptureFixture[str]

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""\
job: tiles
index_dir: index
state_dir: state
sources:
  - {{name: text, records: {DATA}/text/*.jsonl}}
  - {{name: multi, records: {DATA}/multi/*.jsonl, images: {DATA}/multi/*.zip}}
vision: {{mode: tiles, max_tiles: 4}}
plan: {{pack_length: 4096, packer: lbf}}
""",
        encoding="utf-8",
    )
    return path


def test_a_plan_counts_tiles(config: Path, capsys: Capture) -> None:
    assert run("index", config) == 0
    capsys.readouterr()
    grid = ("--dp-size", 2, "--micro-steps", 2)
    assert run("plan", config, "--steps", "0:3", "--json", *grid) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    packs = [pack for step in steps for cell in step["cells"] for pack in cell["packs"]]
    assert sum(pack["image_tokens"] for pack in packs) > 0
    for pack in packs:
        tiles, rest = divmod(pack["image_tokens"], 256)
        assert rest == 0
        assert tiles <= 5 * pack["num_images"]
        assert pack["cost"] == tiles * 1024 * (4096 + 1024)
        assert pack["tokens"] <= 4096


def test_tiles_are_simulated(config: Path, capsys: Capture) -> None:
    grid = ("--dp-size", 2, "--micro-steps", 2)
    sweep = ("--sweep", "max_tiles=1,4")
    assert run("simulate", config, *grid, *sweep, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert "over tiles of p patches" in report["assumptions"][0]
    few, many = report["sweep"]
    assert few["mean_vit_ms"] < many["mean_vit_ms"]
    assert many["mean_vit_ms"] == pytest.approx(report["mean_vit_ms"])


def test_what_says_nothing_of_tiles_is_refused(config: Path, capsys: Capture) -> None:
    grid = ("--dp-size", 2, "--micro-steps", 2)
    assert run("simulate", config, *grid, "--sweep", "max_pixels=200704") == 2
    assert "sweep max_tiles" in " ".join(capsys.readouterr().err.split())
    text = config.read_text(encoding="utf-8")
    config.write_text(f"{text.rstrip()[:-1]}, phases: [{{windows: 1, max_pixels: 9000}}, {{}}]}}\n")
    assert run("plan", config, "--steps", "0:1", *grid) == 2
    assert "give max_tiles" in " ".join(capsys.readouterr().err.split())
