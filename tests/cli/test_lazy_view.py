"""The commands on a lazy index: what they print, and that they agree with the full one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import run


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """300 texts, every tenth broken."""
    lines = [
        json.dumps({"text": f"text {i} " + "word " * (7 * i % 90)}) if i % 10 else "{"
        for i in range(300)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return write_config(tmp_path, "lazy")


def write_config(folder: Path, index: str, **plan: object) -> Path:
    path = folder / f"{index}.yaml"
    settings = {"pack_length": 512, "lanes": 2, "window": 40, **plan}
    path.write_text(
        f"job: cli\nindex_dir: {index}\nindex: {index}\nstate_dir: state\n"
        f"sources: [{{name: text, records: text.jsonl, mean_tokens: 200}}]\n"
        f"plan: {json.dumps(settings)}\n",
        encoding="utf-8",
    )
    return path


def plan_lines(config: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    arguments = ("--steps", "0:2", "--dp-size", "2", "--micro-steps", "2", "--json")
    assert run("plan", config, *arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_index_finds_records_and_says_that_it_counts_none(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("index", run_yaml) == 0
    printed = capsys.readouterr().out
    assert "text: 300 records in 1 files" in printed
    assert "index: lazy counts no record now" in printed
    assert "counted so far: 0 of 5 blocks" in printed
    plan_lines(run_yaml, capsys)
    assert run("index", run_yaml) == 0
    printed = capsys.readouterr().out
    assert "found in 0 files, 1 were up to date" in printed
    assert "records of them cannot be used" in printed
    assert "not valid JSON" in printed or "JSON" in printed
    assert f"{run_yaml.parent / 'text.jsonl'}:1\n" in printed


def test_plan_prints_what_it_prints_of_the_full_index(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lazy = plan_lines(run_yaml, capsys)
    full = plan_lines(write_config(run_yaml.parent, "full"), capsys)
    assert lazy == full
    assert json.loads(lazy[0])["counts"]["text"]["rejected"] > 0
    assert len(lazy) == 2


def test_a_plan_that_needs_all_counts_is_refused_before_anything_is_read(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"text": {"micro_steps": 1}, "vision": {"micro_steps": 1}}
    config = write_config(run_yaml.parent, "lazy", segregate=kinds)
    assert run("index", config) == 2
    assert "plan.segregate" in capsys.readouterr().err
    assert not (run_yaml.parent / "lazy").exists()
    assert run("index", config, "--debug") == 2
    assert "ConfigError" in capsys.readouterr().err
