"""The command line, in process, on small data: what it prints, and what a failure says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import typer.main
from PIL import Image
from support.command import run

from dataservice import __version__
from dataservice.actors.launch import running_service
from dataservice.cli.app import app
from dataservice.config import load_config
from dataservice.errors import ConfigError
from dataservice.rpc.server import start_server
from dataservice.wire.messages import GetStatus, Scaled, ScaleWorkers, StatusReport

SECURITY = ["--ca", "--cert", "--key", "--server-name", "--token-file"]
GRID = ["--dp-size", "2", "--micro-steps", "3"]


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """60 texts, 20 captions and one broken record of each kind."""
    texts = [json.dumps({"text": f"text {i} " + "word " * (7 * i % 90)}) for i in range(60)]
    texts.insert(4, '{"text": ')
    (tmp_path / "text.jsonl").write_text("\n".join(texts), encoding="utf-8")
    with (
        zipfile.ZipFile(tmp_path / "caption.zip", "w") as archive,
        open(tmp_path / "caption.jsonl", "w", encoding="utf-8") as lines,
    ):
        for i in range(20):
            picture = BytesIO()
            Image.new("RGB", (40 + 9 * i, 60)).save(picture, "PNG")
            if i != 3:
                archive.writestr(f"{i}.png", picture.getvalue())
            turns = [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": f"Picture {i}."},
            ]
            lines.write(json.dumps({"image": f"{i}.png", "conversations": turns}) + "\n")
    config = tmp_path / "run.yaml"
    config.write_text(
        """\
job: cli
index_dir: index
state_dir: state
sources:
  - {name: text, records: text.jsonl}
  - {name: caption, records: caption.jsonl, images: caption.zip}
vision: {max_pixels: 50176}
plan: {pack_length: 512}
""",
        encoding="utf-8",
    )
    return config


def plan_json(
    capsys: pytest.CaptureFixture[str], config: Path, steps: str, *grid: str
) -> list[dict[str, Any]]:
    assert run("plan", config, "--steps", steps, "--json", *(grid or GRID)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- index ---------------------------------------------------------------------------------------


def test_index_counts_and_names_what_it_cannot_use(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("index", run_yaml) == 0
    out = capsys.readouterr().out
    assert "79 samples" in out
    assert "2 records cannot be used" in out
    assert "text.jsonl:5" in out
    assert "caption.jsonl:4" in out
    assert "3.png" in out


def test_plan_builds_the_index_once(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", run_yaml, "--steps", "0:1", *GRID) == 0
    assert "index" in capsys.readouterr().err
    assert run("plan", run_yaml, "--steps", "0:1", *GRID) == 0
    assert "index" not in capsys.readouterr().err


def test_sources_without_a_usable_record_are_named(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_yaml.parent / "bad.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    bad = "  - {name: bad, records: bad.jsonl}\n"
    text = run_yaml.read_text()
    run_yaml.write_text(text.replace("sources:\n", f"sources:\n{bad}", 1))
    assert run("plan", run_yaml, "--steps", "0:1", *GRID) == 0
    assert "source bad: none of its 2 records can be used" in capsys.readouterr().err
    run_yaml.write_text(f"{text.split('  - ')[0]}{bad}")
    assert run("plan", run_yaml, "--steps", "0:1", *GRID) == 2
    assert "sources: none of the 2 records can be used; the first: unk" in capsys.readouterr().err


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_gives_every_cell_and_every_sample_once(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = plan_json(capsys, run_yaml, "0:100")
    packs = [pack for step in steps for cell in step["cells"] for pack in cell["packs"]]
    for number, step in enumerate(steps):
        assert step["step"] == number
        cells = [(cell["micro_step"], cell["dp_rank"]) for cell in step["cells"]]
        assert cells == [(micro, rank) for micro in range(3) for rank in range(2)]
        assert all(len(cell["packs"]) == 1 for cell in step["cells"])
        loss = sum(pack["loss_tokens"] for cell in step["cells"] for pack in cell["packs"])
        assert step["loss_tokens"] == loss
        assert step["lockstep_bound"] <= step["lockstep_cost"]
    real = [pack for pack in packs if pack["number"] >= 0]
    assert sorted(pack["number"] for pack in real) == list(range(len(real)))
    assert all(
        pack["number"] == -1 and not pack["sample_keys"]
        for pack in packs[len(real) :]
        if pack["pack_id"].startswith("pad.")
    )
    keys = [key for pack in real for key in pack["sample_keys"]]
    assert len(set(keys)) == 79
    assert sum(pack["num_images"] for pack in real) == 19
    assert max(pack["tokens"] for pack in real) <= 512


def test_a_step_is_the_same_wherever_the_range_begins(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = plan_json(capsys, run_yaml, "0:3")
    assert plan_json(capsys, run_yaml, "2:3") == whole[2:]


def test_another_grid_deals_the_same_packs(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = plan_json(capsys, run_yaml, "0:1", "--dp-size", "3", "--micro-steps", "2")
    tall = plan_json(
        capsys, run_yaml, "0:1", "--dp-size", "1", "--micro-steps", "3", "--packs-per-cell", "2"
    )
    ids = [
        sorted(pack["pack_id"] for cell in steps[0]["cells"] for pack in cell["packs"])
        for steps in (wide, tall)
    ]
    assert ids[0] == ids[1]
    assert [len(cell["packs"]) for cell in tall[0]["cells"]] == [2, 2, 2]


def test_plan_table_is_for_people(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", run_yaml, "--steps", "0:1", *GRID) == 0
    out = capsys.readouterr().out
    assert "step 0: 6 packs, " in out
    assert "in arrival order" in out
    for heading in ("micro", "rank", "pack", "tokens", "images", "cost", "lane", "samples"):
        assert heading in out
    assert "text/text.jsonl@" in out


def test_range_past_the_end_is_said(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", run_yaml, "--steps", "0:500", "--json", *GRID) == 0
    captured = capsys.readouterr()
    last = json.loads(captured.out.splitlines()[-1])["step"]
    assert f"the plan ends after step {last}" in captured.err
    assert run("plan", run_yaml, "--steps", "400:500", *GRID) == 2
    assert "the plan ends before step 400" in capsys.readouterr().err


def test_a_plan_without_a_step_says_why(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_yaml.read_text(encoding="utf-8")
    run_yaml.write_text(text.replace("512}", "512, remainder: drop}"), encoding="utf-8")
    grid = ("--dp-size", "500", "--micro-steps", "2")
    assert run("plan", run_yaml, "--steps", "0:1", *grid) == 2
    assert "the plan has not one step of 1000 packs: " in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["5", "3:3", "4:2", "a:b", "-1:3", ""])
def test_steps_that_are_no_range_are_refused(
    run_yaml: Path, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    assert run("plan", run_yaml, f"--steps={steps}", *GRID) == 2
    assert "should be A:B" in capsys.readouterr().err


# ---- a running service ---------------------------------------------------------------------------


class FakeCoordinator:
    """Answers operators; the other methods exist, as a server wants, and fail."""

    def __init__(self) -> None:
        self.workers = 1

    def __getattr__(self, method: str) -> Any:
        async def refuse(_request: object) -> None:
            raise ConfigError(f"{method} is not for operators")

        return refuse

    async def get_status(self, _request: GetStatus) -> StatusReport:
        worker = {
            "node": "n" * 56,
            "draining": False,
            "ready_packs": 7,
            "ready_bytes": 5 << 20,
            "queued_packs": 2,
            "served_packs": 1234,
            "images": 99,
            "read_origin_bytes": 0,
            "storage_stalls": 0,
            "stuck_reads": 0,
        }
        stager = {
            "node": "n" * 56,
            "host": "data-node-0007.example",
            "cached_bytes": 8_123_400_000_000,
            "budget_bytes": 9_000_000_000_000,
            "missing_bytes": 123_400_000_000,
            "bytes_per_s": 2_048_000_000,
            "read_through_shards": 12,
            "read_through_bytes": 77_700_000_000,
            "evictions": 345,
            "errors": 2,
            "stalls": 5,
            "last_error": "storage stall: read /nfs/a.zip at 0: no answer within 30 s",
        }
        report = {
            "job": "cli",
            "state": "serving",
            "plan_digest": "ab" * 32,
            "samples": 650,
            "bad_image": "fallback",
            "holes": 3,
            "worst_shards": {"caption/a.jsonl": 3},
            "quarantine": "/state/quarantine.jsonl",
            "target_workers": 2,
            "winding_down": True,
            "drained_nodes": ["d" * 56, "e" * 56],
            "scaling": {"reason": "trainers wait 12% of their time for packs"},
            "workers": [
                {"id": "w0"} | worker | {"storage_stalls": 3, "stuck_reads": 1},
                {"id": "w1"} | worker | {"draining": True, "retiring": "4 decodes hang"},
                {"id": "w2"} | worker | {"stuck_decodes": 2},
            ],
            "stagers": [stager],
            "session": {
                "run_id": "night",
                "done_step": 12,
                "end_step": -1,
                "dp_size": 2,
                "micro_steps": 4,
                "waited_s": [0.5, 61.25],
                "failure": "",
            },
        }
        return StatusReport(status=json.dumps(report))

    async def scale(self, request: ScaleWorkers) -> Scaled:
        if request.workers > 4:
            raise ConfigError(f"{request.workers} workers are more than workers.max 4")
        before, self.workers = self.workers, request.workers or 2
        return Scaled(before=before, target=self.workers, reason="as was asked")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Of a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        fake: Any = FakeCoordinator()
        starting = asyncio.run_coroutine_threadsafe(start_server(coordinator=fake), loop)
        server = starting.result(10)
        yield server.endpoint
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_status_says_who_waits_and_fits_80_columns(
    endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("status", endpoint) == 0
    printed = capsys.readouterr().out
    out = " ".join(printed.split())
    for words in (
        "cli",
        "step 12",
        "rank 1, 61.2 s",
        "caption/a.jsonl: 3",
        "3 (bad_image: fallback)",
        "every hole: /state/quarantine.jsonl",
        "worker w1 retires: 4 decodes hang",
        "worker w2: 2 decodes hang",
        "w1 (draining)",
        "no more steps are handed out",
        "dddddddd, eeeeeeee",
        "trainers wait 12% of their time for packs",
        "1,234",
        "8.1 TB",
        "2.0 GB",
        "12 shards of 77.7 GB are read from their origins",
        "storage stalls of worker w0: 3 builds",
        "no answer within 30 s",
    ):
        assert words in out
    assert "\u2026" not in out
    assert max(map(len, printed.splitlines())) <= 80
    assert run("status", endpoint, "--json") == 0
    assert json.loads(capsys.readouterr().out)["session"]["done_step"] == 12


def test_scale_says_before_and_after(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("scale", endpoint, 3) == 0
    assert capsys.readouterr().out == "workers: 1, now going to 3 (as was asked)\n"
    assert run("scale", endpoint, "auto") == 0
    assert capsys.readouterr().out == "workers: 3, now going to 2 (as was asked)\n"
    assert run("scale", endpoint, 4, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "before": 2,
        "target": 4,
        "reason": "as was asked",
    }
    assert run("scale", endpoint, 5) == 2
    assert "5 workers are more than workers.max 4" in capsys.readouterr().err
    for wrong in ("0", "many", "\u0663"):
        assert run("scale", endpoint, wrong) == 2
        assert "give a number of at least 1, or auto" in capsys.readouterr().err


def test_nobody_at_the_endpoint_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "127.0.0.1:1") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "127.0.0.1:1" in err
    assert "Traceback" not in err


# ---- errors and surface --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["index", "plan", "serve"])
def test_wrong_config_is_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("jbo: x\n")
    extra = ["--steps", "0:1", *GRID] if command == "plan" else []
    assert run(command, config, *extra) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "jbo: unknown key; did you mean job?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("field", "extra"),
    [
        ("state_dir", ""),
        ("index_dir", "index: lazy\n"),
        ("staging.cache_dir", "staging: {cache_dir: text.jsonl/x}\n"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_said_before_anything_starts(
    run_yaml: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    extra: str,
) -> None:
    def ray_would_start(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("dataservice.actors.launch.joined_ray", ray_would_start)
    text = run_yaml.read_text().replace(f"{field}: ", f"{field}: text.jsonl/")
    run_yaml.write_text(text + extra)
    assert run("serve", run_yaml) == 2
    err = capsys.readouterr().err
    assert f"{field} {run_yaml.parent}/text.jsonl/" in err
    assert f"cannot be written to ({run_yaml.parent}/text.jsonl" in err
    assert "is no folder); name a folder on this machine that can be" in err
    assert not (run_yaml.parent / "index").exists()
    with (
        pytest.raises(ConfigError, match="cannot be written to"),
        running_service(load_config(run_yaml)),
    ):
        pass


def test_workers_outside_the_configured_range_are_refused(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", run_yaml, "--workers", 65) == 2
    assert "--workers 65 is not between workers.min 1" in capsys.readouterr().err


def test_commands_and_options_are_these() -> None:
    group: Any = typer.main.get_command(app)
    surface = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in group.commands.items()
    }
    assert surface == {
        "index": ["--address", "--json", "--processes", "config"],
        "inspect": [
            "--dp-size",
            "--json",
            "--micro-steps",
            "--packs-per-cell",
            "--steps",
            "config",
            "what",
        ],
        "preview": [
            "--dp-size",
            "--json",
            "--micro-steps",
            "--out",
            "--packs",
            "--packs-per-cell",
            "--rank",
            "--steps",
            "config",
        ],
        "state": ["--json", "other", "state"],
        "lint": ["--digest", "--images", "--json", "files"],
        "plan": ["--dp-size", "--json", "--micro-steps", "--packs-per-cell", "--steps", "config"],
        "simulate": [
            "--cost-file",
            "--dp-size",
            "--html",
            "--json",
            "--llm-ms",
            "--micro-steps",
            "--node-gbits",
            "--packs-per-cell",
            "--ranks-per-node",
            "--steps",
            "--sweep",
            "--synthetic",
            "--vit-ms-per-token",
            "config",
        ],
        "fit-cost": ["--json", "--out", "timings"],
        "replay": ["--holes", "--json", "--out", "--rank", "--state", "--step", "config"],
        "serve": ["--address", "--host", "--insecure", "--port", "--workers", "config"],
        "stage": [
            "--dp-size",
            "--json",
            "--micro-steps",
            "--node",
            "--nodes",
            "--packs-per-cell",
            "--steps",
            "config",
        ],
        "status": sorted(["--json", *SECURITY, "endpoint"]),
        "scale": sorted(["--json", *SECURITY, "endpoint", "workers"]),
        "top": sorted(["--count", "--every-s", "--json", *SECURITY, "endpoint"]),
        "drain": sorted(
            [
                *SECURITY,
                "--json",
                "--node",
                "--now",
                "--timeout-s",
                "--undo",
                "--wait",
                "--worker",
                "endpoint",
            ]
        ),
        "doctor": ["--cache-dir", "--json", "--state-dir", "config"],
        "bench": ["--gpus", "--json", "--pack-s", "--seconds", "config"],
    }
    assert [option for parameter in group.params for option in parameter.opts] == [
        "--debug",
        "--version",
        "--install-completion",
        "--show-completion",
    ]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dataservice {__version__}\n"


def test_command_line_imports_neither_ray_nor_torch() -> None:
    code = "import dataservice.cli, sys; print('ray' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.split() == ["False", "False"]
