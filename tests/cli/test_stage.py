"""`dataservice stage`, in process, on small data."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import run

from dataservice.cli import stage_view
from dataservice.core.lanes import lane_nodes

NUM_FILES = 12
BY_FILE = 40


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """480 texts in twelve files of some 3 kB, in four lanes."""
    for number in range(NUM_FILES):
        texts = [json.dumps({"text": f"{number}-{i} " + "word " * 12}) for i in range(BY_FILE)]
        (tmp_path / f"text{number:02d}.jsonl").write_text("\n".join(texts), encoding="utf-8")
    path = tmp_path / "run.yaml"
    settings = {
        "job": "stage",
        "index_dir": "index",
        "state_dir": "state",
        "sources": [{"name": "text", "records": "text*.jsonl"}],
        "plan": {"pack_length": 256, "lanes": 4, "window": 20, "segment": 4},
        "staging": {"cache_dir": "cache", "budget_bytes": "1 MB"},
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def staged(capsys: pytest.CaptureFixture[str], config: Path, *options: object) -> dict[str, Any]:
    assert run("stage", config, "--json", "--dp-size", 2, "--micro-steps", 2, *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def copies(config: Path) -> set[str]:
    names = os.listdir(config.parent / "cache")
    return {name[33:] for name in names if not name.startswith(".")}


def read_by_plan(capsys: pytest.CaptureFixture[str], config: Path, steps: str) -> set[str]:
    grid = ("--dp-size", 2, "--micro-steps", 2)
    assert run("plan", config, "--steps", steps, "--json", *grid) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    packs = [pack for step in found for cell in step["cells"] for pack in cell["packs"]]
    return {key.split("/")[1].split("@")[0] for pack in packs for key in pack["sample_keys"]}


def test_what_the_steps_read_is_there_and_nothing_else(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read_by_plan(capsys, config, "2:4")
    assert 0 < len(expected) < NUM_FILES
    first = staged(capsys, config, "--steps", "2:4")
    assert copies(config) == expected
    assert first["needed_shards"] == first["staged_shards"] == len(expected)
    assert first["copied_bytes"] == first["needed_bytes"] == first["cached_bytes"]
    again = staged(capsys, config, "--steps", "2:4")
    assert (again["copied_shards"], again["staged_shards"]) == (0, len(expected))


def test_a_budget_is_respected_and_what_it_leaves_out_is_said(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = yaml.safe_load(config.read_text())
    settings["staging"]["budget_bytes"] = "10 kB"
    config.write_text(yaml.safe_dump(settings))
    assert run("stage", config, "--steps", ":50") == 0
    captured = capsys.readouterr()
    assert "no room for" in captured.out and "read from their origins" in captured.out
    assert "B/s" in captured.out and "(staging.budget_bytes 10.0 kB)" in captured.out
    assert "read 12 shards of 37.4 kB here" in captured.out
    held = (config.parent / "cache").glob("[0-9a-f]*-*")
    assert 0 < sum(copy.stat().st_size for copy in held) <= 10_000
    assert 0 < len(copies(config)) < NUM_FILES
    assert "the plan ends after step" in captured.err


def test_a_node_stages_its_share(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = socket.gethostname()
    everything = staged(capsys, config, "--steps", "0:3")
    shares = {
        node: staged(capsys, config, "--steps", "0:3", "--nodes", f"{host},other", "--node", node)
        for node in (host, "other")
    }
    assert len(set(lane_nodes(4, [host, "other"]))) == 2
    needed = [share["needed_shards"] for share in shares.values()]
    assert max(needed) <= everything["needed_shards"] <= sum(needed)
    own = staged(capsys, config, "--steps", "0:3", "--nodes", f"{host},other")
    assert own["needed_shards"] == shares[host]["needed_shards"]
    assert run("stage", config, "--steps", "0:1", "--nodes", "a,b") == 2
    assert f"this node, {host}, is not among them" in capsys.readouterr().err


def test_what_cannot_be_copied_is_said_and_the_rest_is_copied(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataservice.storage.staging import area

    real = area.copy_into

    def fail_once(fd: int, need: Any, *rest: Any, **options: Any) -> None:
        if need.shard.name == "text03.jsonl":
            raise OSError(5, "Input/output error")
        real(fd, need, *rest, **options)

    monkeypatch.setattr(area, "copy_into", fail_once)
    assert run("stage", config, "--steps", "0:50") == 1
    out = capsys.readouterr().out
    assert "1 shards could not be copied" in out and "text03.jsonl" in out and "Input/output" in out
    assert len(copies(config)) == NUM_FILES - 1


def test_wrong_settings_are_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stage", config, "--steps", "5000:5001") == 2
    assert "the plan ends before step 5000" in capsys.readouterr().err
    assert run("stage", config, "--steps", "x") == 2
    assert "should be A:B" in capsys.readouterr().err
    assert run("stage", config, "--steps", "0:1", "--nodes", "a,,b", "--node", "a") == 2
    assert "--nodes a,,b: a name is empty" in capsys.readouterr().err
    assert run("stage", config, "--steps", "1") == 2
    assert "should be A:B" in capsys.readouterr().err
    settings = yaml.safe_load(config.read_text())
    del settings["staging"]
    config.write_text(yaml.safe_dump(settings))
    assert run("stage", config, "--steps", "0:1") == 2
    assert "staging.cache_dir is not set" in capsys.readouterr().err


def test_a_cache_that_cannot_be_used_is_said_and_not_waited_for(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "cache").write_text("a file")
    assert run("stage", config, "--steps", "0:50") == 2
    folder = config.parent / "cache"
    err = capsys.readouterr().err
    assert f"staging.cache_dir {folder} cannot be written to ({folder} is no folder); name" in err


def test_progress_is_shown_where_there_is_no_terminal(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_view, "LINE_S", 0.0)
    assert run("stage", config, "--steps", "20:50", "--dp-size", 2, "--micro-steps", 1) == 0
    err = capsys.readouterr().err
    assert "stage: looking for step 20, at 0" in err
    assert "stage: planning step 49 of 20:50" in err
    assert "B/s" in err and "shards to go" in err


def test_a_lazy_index_is_staged_as_a_full_one(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = staged(capsys, config, "--steps", "3:7")
    lazy = config.with_name("lazy.yaml")
    settings = yaml.safe_load(config.read_text())
    settings |= {"index": "lazy", "index_dir": "lazy"}
    lazy.write_text(yaml.safe_dump(settings))
    found = staged(capsys, lazy, "--steps", "3:7")
    assert found["copied_shards"] == 0
    for name in ("needed_shards", "needed_bytes", "staged_shards", "failed_shards"):
        assert found[name] == expected[name]
