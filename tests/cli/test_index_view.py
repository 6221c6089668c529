"""`dataservice index --json`: what the summary says, for programs; full and lazy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.demo_config import demo_settings, write_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    good = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(5))
    (tmp_path / "a.jsonl").write_text(good + '{"text": 5}\n{"text": 6}\n{broken\n')
    return tmp_path


def config(folder: Path, **more: Any) -> Path:
    settings = demo_settings(folder)
    settings["sources"] = [{"name": "own", "records": str(folder / "a.jsonl")}]
    return write_config(folder, {**settings, **more})


def indexed(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert run("index", path, "--json") == 0
    found = capsys.readouterr()
    assert not found.err and found.out.count("\n") == 1
    told: dict[str, Any] = json.loads(found.out)
    return told


def test_json_has_what_the_summary_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder)
    told = indexed(capsys, path)
    assert (told["index"], told["num_samples"], told["num_rejected"]) == ("full", 5, 3)
    (source,) = told["sources"]
    assert (source["name"], source["num_samples"], source["shards_read"]) == ("own", 5, 1)
    assert [kind["count"] for kind in told["rejected_by_reason"]] == [2, 1]
    assert told["rejected_by_reason"][0]["places"][0].endswith("a.jsonl:6")
    assert Path(told["rejected_path"]).read_text().count("\n") == 3
    assert run("index", path) == 0
    out = capsys.readouterr().out
    assert f"in all 5 samples; index {told['digest'][:12]}" in out
    assert f"{source['text_tokens']:,} text tokens ({source['loss_tokens']:,} with loss)" in out
    assert indexed(capsys, path)["sources"][0]["shards_reused"] == 1


def test_json_of_a_lazy_index(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, index="lazy")
    told = indexed(capsys, path)
    assert (told["index"], told["num_records"], told["files_read"]) == ("lazy", 8, 1)
    assert told["sources"] == [{"name": "own", "num_records": 8, "files": 1}]
    assert told["counted_blocks"] == 0 < told["all_blocks"]
    assert run("index", path) == 0
    out = capsys.readouterr().out
    assert re.search(rf"in all 8 records.*lazy index {told['digest'][:12]}", out)
