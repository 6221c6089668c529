"""`dataservice simulate` in process, on synthetic mixes and on the demo's index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import command

from dataservice.cli.simulate_words import STRATEGY
from dataservice.core.fitted import FittedCost
from dataservice.core.simulate import STRATEGIES
from dataservice.core.simulate.pool import PACKERS

Capture = pytest.CaptureFixture[str]

DEMO = Path(__file__).parents[2] / "deploy" / "demo.yaml"
GRID = ("--dp-size", "8", "--micro-steps", "4")


def run(*arguments: object) -> int:
    return command.run("simulate", *arguments)


def found(capsys: Capture, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def refused(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def of(report: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next(s for s in report["strategies"] if s["strategy"] == strategy)


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEMO_DIR", str(tmp_path))
    return DEMO


# ---- what it shows ------------------------------------------------------------------------------


def test_a_synthetic_mix_is_compared_in_full(capsys: Capture) -> None:
    report = found(capsys, "--synthetic", "text80", *GRID)
    assert [s["strategy"] for s in report["strategies"]] == list(STRATEGIES)
    assert [p["packer"] for p in report["packers"]] == list(PACKERS)
    assert (report["pack_length"], report["num_steps"], report["html"]) == (8192, 1, None)
    assert report["llm_ms"] == pytest.approx(report["mean_vit_ms"])
    assert of(report, "arrival")["gain"] == 0
    best = min(s["idle_lockstep"] for s in report["strategies"])
    assert best == min(of(report, name)["idle_lockstep"] for name in ("two_pass", "balanced"))
    assert report["idle_by_ranks"]["ranks"] == [8]
    assert "no --llm-ms was given" in report["assumptions"][0]


def test_the_table_and_the_page_are_written(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--synthetic", "mostlyvl", *GRID, "--sweep", "open_bins=4,8") == 0
    out = capsys.readouterr().out
    for name in STRATEGY.values():
        assert name in out
    assert "moves nothing at training time" in " ".join(out.split())
    assert f"report: {tmp_path / 'simulation.html'}" in out
    page = (tmp_path / "simulation.html").read_text(encoding="utf-8")
    for words in (*STRATEGY.values(), "Sweep", "Fill against packer"):
        assert words in page
    assert run("--synthetic", "mostlyvl", *GRID, "--html", "other.html", "--json") == 0
    assert json.loads(capsys.readouterr().out)["html"] == str(tmp_path / "other.html")
    assert (tmp_path / "other.html").exists()


def test_given_times_are_used(capsys: Capture) -> None:
    times = ("--llm-ms", "1000", "--vit-ms-per-token", "0.5")
    report = found(capsys, "--synthetic", "text80", *GRID, *times)
    assert report["llm_ms"] == 1000
    halved = found(capsys, "--synthetic", "text80", *GRID, "--vit-ms-per-token", "0.25")
    assert halved["mean_vit_ms"] == pytest.approx(report["mean_vit_ms"] / 2)
    # A heavier LLM hides the vision encoder's waiting.
    heavy = found(capsys, "--synthetic", "text80", *GRID, "--llm-ms", "1e6")
    assert of(heavy, "arrival")["idle_lockstep"] < 0.05


def test_a_cost_file_gives_whole_times(capsys: Capture, tmp_path: Path) -> None:
    cost = FittedCost.of(
        patches_fs=50_000 * 10**6, patches_squared_fs=0, length_squared_fs=0, constant_fs=10**15
    )
    file = tmp_path / "cost.json"
    file.write_text(cost.to_json(), encoding="utf-8")
    arguments = ("--synthetic", "text80", *GRID, "--cost-file", file)
    report = found(capsys, *arguments)
    assert report["llm_ms"] == 1000
    assert cost.version in report["assumptions"][0]
    # The same by tokens: 4 patches of 50 us are 0.2 ms.
    times = ("--llm-ms", "1000", "--vit-ms-per-token", "0.2")
    by_tokens = found(capsys, "--synthetic", "text80", *GRID, *times)
    assert report["mean_vit_ms"] == pytest.approx(by_tokens["mean_vit_ms"])
    assert "leave them out" in refused(capsys, *arguments, "--llm-ms", "3")


def test_a_sweep_has_a_row_a_combination(capsys: Capture) -> None:
    sweep = ("--sweep", "dp_size=4,8", "--sweep", "pack_length=8192,4096")
    report = found(capsys, "--synthetic", "text80", *GRID, "--llm-ms", "100", *sweep)
    rows = report["sweep"]
    assert [(row["dp_size"], row["pack_length"]) for row in rows] == [
        (4, 8192),
        (4, 4096),
        (8, 8192),
        (8, 4096),
    ]
    assert rows[2]["strategies"] == report["strategies"]
    assert [row["llm_ms"] for row in rows] == [100, 50, 100, 50]
    alone = found(capsys, "--synthetic", "text80", "--dp-size", 4, "--micro-steps", 4)
    assert of(rows[0], "arrival")["fill"] == pytest.approx(of(alone, "arrival")["fill"])


def test_max_pixels_and_open_bins_are_swept(capsys: Capture) -> None:
    sweep = ("--sweep", "max_pixels=262144,4194304", "--sweep", "open_bins=1,16")
    rows = found(capsys, "--synthetic", "mostlyvl", *GRID, *sweep)["sweep"]
    small, large = rows[0], rows[2]
    assert small["mean_vit_ms"] < large["mean_vit_ms"]
    few, many = (next(p for p in row["packers"] if p["packer"] == "nbin_v1") for row in rows[2:])
    assert few["fill"] < many["fill"]
    assert of(rows[2], "two_pass") == of(rows[3], "two_pass")


def test_a_config_is_simulated_on_its_index(capsys: Capture, demo: Path) -> None:
    report = found(capsys, demo, "--dp-size", 2, "--micro-steps", 4, "--steps", 3)
    assert report["workload"] == "demo"
    assert (report["pack_length"], report["num_steps"]) == (2048, 3)
    assert of(report, "two_pass")["idle_lockstep"] <= of(report, "arrival")["idle_lockstep"]


def test_data_that_ends_is_said(capsys: Capture, demo: Path) -> None:
    assert run(demo, "--dp-size", 2, "--micro-steps", 4, "--steps", 100_000, "--json") == 0
    out, err = capsys.readouterr()
    steps = json.loads(out)["num_steps"]
    assert f"the data ends after {steps} whole steps" in err
    said = refused(capsys, demo, "--dp-size", 1024, "--micro-steps", 64)
    assert "ends before a step is full" in said
    assert "65,536" in said


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("either a CONFIG or --synthetic", "text80, mostlyvl, gravity")),
        (("run.yaml", "--synthetic", "text80"), ("not both",)),
        (("--synthetic", "text08"), ("text08", "text80, mostlyvl, gravity")),
        (("no.yaml",), ("no.yaml", "cannot be read")),
        (("--synthetic", "text80", "--sweep", "ranks=4"), ("'ranks' is not swept", "dp_size")),
        (("--synthetic", "text80", "--sweep", "dp_size=4,x"), ("whole numbers", "dp_size=1,2,4")),
        (("--synthetic", "text80", "--sweep", "dp_size=0"), ("at least 1",)),
        (
            ("--synthetic", "text80", "--sweep", "dp_size=4", "--sweep", "dp_size=8"),
            ("given twice",),
        ),
        (("--synthetic", "text80", "--sweep", "max_pixels=9"), ("max_pixels=9", "min_pixels")),
        (("--synthetic", "text80", "--sweep", "pack_length=99999999"), ("at most 16,777,216",)),
        (("--synthetic", "text80", "--sweep", "dp_size=999999999"), ("packs a step",)),
        (("--synthetic", "text80", "--llm-ms", "inf"), ("--llm-ms inf", "1e+09")),
        (("--synthetic", "text80", "--llm-ms", "1e308"), ("--llm-ms 1e+308", "1e+09")),
        (("--synthetic", "text80", "--vit-ms-per-token", "inf"), ("--vit-ms-per-token inf",)),
        (("--synthetic", "text80", "--node-gbits", "inf"), ("--node-gbits inf",)),
        (("--synthetic", "text80", "--ranks-per-node", "3"), ("3 does not divide", "8")),
        (("--synthetic", "text80", "--cost-file", "no.json"), ("no.json", "cannot be read")),
        (("--synthetic", "text80", "--html", "/no/such/folder/x.html"), ("/no/such/folder",)),
    ],
)
def test_errors_name_what_is_wrong_and_what_to_do(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: Capture
) -> None:
    said = refused(capsys, *arguments, *GRID)
    for expected in words:
        assert expected in said
    assert "Traceback" not in said


def test_a_wrong_option_is_named(capsys: Capture) -> None:
    assert "--micro-step " in refused(capsys, "--synthetic", "text80", "--micro-step", "4")
