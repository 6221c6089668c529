"""`dataservice fit-cost`: what it reads, prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.command import run

from dataservice.config.cost_file import load_cost_file
from dataservice.errors import ConfigError

ROWS = 400
A_NS, B_NS, C_NS, D_NS = 60_000.0, 15.0, 0.4, 30e6
"""Per patch, patch^2, token^2 and micro-batch."""

Row = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def rows(noise: float = 0.02) -> list[Row]:
    rng = np.random.Generator(np.random.Philox(7))
    made = []
    for i in range(ROWS):
        images = 4 * rng.integers(16, 1024, rng.integers(0, 6))
        documents = rng.integers(50, 3000, rng.integers(1, 8))
        p, p2, l2 = images.sum(), (images**2).sum(), (documents**2).sum()
        ns = (A_NS * p + B_NS * p2 + C_NS * l2 + D_NS) * (1 + noise * rng.standard_normal())
        terms = {"patches": int(p), "patches_squared": int(p2), "length_squared": int(l2)}
        made.append({"step": i // 8, "dp_rank": i % 8, **terms, "ms": float(ns / 1e6)})
    return made


def jsonl(path: Path, made: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def csv(path: Path, made: list[Row]) -> Path:
    lines = [",".join(made[0]), *(",".join(map(str, row.values())) for row in made)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def found(capture: Capture, *arguments: object) -> Row:
    assert run("fit-cost", *arguments, "--json") == 0
    result: Row = json.loads(capture.readouterr().out)
    return result


def in_seconds(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if name != "ms"} | {
        "seconds": row["ms"] / 1e3
    }


# ---- what it finds -------------------------------------------------------------------------------


def test_prints_the_model_its_error_and_the_config_lines(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "cost.json"
    assert run("fit-cost", jsonl(tmp_path / "t.jsonl", rows(noise=0)), "--out", out) == 0
    text = capsys.readouterr().out
    assert "400 rows" in text
    assert "60 ms per 1,000 patches" in text
    assert "15 ms per image of 1,000 patches" in text
    assert "0.4 ms per document of 1,000 tokens" in text
    assert "30 ms per micro-batch" in text
    assert "p_ref" in text
    assert "4,000 patches" in text
    assert "within 0.0%" in text
    assert yaml.safe_load(text[text.index("plan:") :]) == {
        "plan": {"cost": "fitted", "cost_file": str(out)}
    }
    cost = load_cost_file(out)
    assert f"version {cost.version}" in text
    assert cost.coefficients_fs == pytest.approx((A_NS * 1e6, B_NS * 1e6, C_NS * 1e6, D_NS * 1e6))


def test_without_out_nothing_is_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "t.jsonl", rows())
    assert run("fit-cost", "t.jsonl") == 0
    assert "--out cost.json writes the model" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_every_form_of_the_same_rows_gives_the_same_fit(tmp_path: Path, capsys: Capture) -> None:
    made = rows()
    expected = found(capsys, jsonl(tmp_path / "a.jsonl", made))
    assert expected["num_rows"] == ROWS
    assert expected["p_ref"] == pytest.approx(4000, rel=0.2)
    assert expected["error_median"] == pytest.approx(0.0135, rel=0.3)
    forms = [
        [csv(tmp_path / "a.csv", made)],
        [csv(tmp_path / "named_oddly.txt", [in_seconds(row) for row in made])],
        [jsonl(tmp_path / "s.jsonl", [in_seconds(row) for row in made])],
        [jsonl(tmp_path / "r0.jsonl", made[:100]), csv(tmp_path / "r1.csv", made[100:])],
    ]
    for paths in forms:
        result = found(capsys, *paths)
        assert result["patches_s"] == pytest.approx(expected["patches_s"], rel=1e-9)
        assert result["num_rows"] == ROWS
    windows = (tmp_path / "a.csv").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "excel.csv").write_bytes(b"\xef\xbb\xbf" + windows + b"\r\n")
    assert found(capsys, tmp_path / "excel.csv") == found(capsys, tmp_path / "a.csv")


def test_json_has_the_file_and_a_dropped_term(tmp_path: Path, capsys: Capture) -> None:
    made = [row | {"patches": 0, "patches_squared": 0} for row in rows()]
    for row in made:
        row["ms"] = (C_NS * row["length_squared"] + D_NS) / 1e6
    out = tmp_path / "cost.json"
    result = found(capsys, jsonl(tmp_path / "t.jsonl", made), "--out", out)
    assert result["dropped"] == ["patches", "patches_squared"]
    assert result["p_ref"] is None
    assert result["cost_file"] == str(out)
    assert result["version"] == load_cost_file(out).version
    assert run("fit-cost", tmp_path / "t.jsonl") == 0
    assert "patches_squared is the same in all rows" in capsys.readouterr().out


def test_the_vision_part_is_fitted_apart_where_every_row_has_its_time(
    tmp_path: Path, capsys: Capture
) -> None:
    made = [
        row | {"vision_ms": (A_NS * row["patches"] + B_NS * row["patches_squared"]) / 1e6}
        for row in rows(noise=0)
    ]
    assert found(capsys, jsonl(tmp_path / "all.jsonl", made))["apart"] is True
    assert run("fit-cost", csv(tmp_path / "all.csv", made)) == 0
    assert "the vision part was fitted to its own time" in capsys.readouterr().out
    del made[7]["vision_ms"]
    assert found(capsys, jsonl(tmp_path / "most.jsonl", made))["apart"] is False
    made[7]["vision_ms"] = -1
    assert run("fit-cost", jsonl(tmp_path / "wrong.jsonl", made)) == 2
    assert "wrong.jsonl:8: vision_ms: -1 should be a number" in capsys.readouterr().err


# ---- what it refuses -----------------------------------------------------------------------------


def with_change(change: Callable[[Row], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        made = rows()
        change(made[2])
        return jsonl(folder / "t.jsonl", made)

    return write


def with_line(line: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = jsonl(folder / "t.jsonl", rows()[:2])
        path.write_text(path.read_text() + line)
        return path

    return write


def as_text(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "t.csv").write_text(text, encoding="utf-8")
        return folder / "t.csv"

    return write


HEADER = "patches,patches_squared,length_squared,ms\n"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (with_change(lambda row: row.pop("patches")), "t.jsonl:3: patches is missing; a row has"),
        (with_change(lambda row: row.update(patches=-4)), "t.jsonl:3: patches: -4 should be"),
        (with_change(lambda row: row.update(patches=True)), "t.jsonl:3: patches: True should be"),
        (with_change(lambda row: row.update(ms=None)), "t.jsonl:3: ms: None should be a number"),
        (with_change(lambda row: row.update(ms=0)), "t.jsonl:3: ms: 0 should be a number from"),
        (with_change(lambda row: row.update(ms=1e-308)), "t.jsonl:3: ms: 1e-308 should be"),
        (with_change(lambda row: row.update(ms=1e300)), "t.jsonl:3: ms: 1e+300 should be"),
        (with_change(lambda row: row.update(patches=1e300)), "t.jsonl:3: patches: 1e+300 should"),
        (with_change(lambda row: row.update(ms=float("nan"))), "t.jsonl:3: not JSON"),
        (with_change(lambda row: row.update(ms="1e999")), "t.jsonl:3: ms: '1e999' should be"),
        (with_change(lambda row: row.update(seconds=1)), "t.jsonl:3: should have either ms or"),
        (with_change(lambda row: row.pop("ms")), "either ms or seconds, has neither"),
        (with_line('{"patches": 12, "pat'), "t.jsonl:3: not JSON"),
        (with_line("[1, 2]\n"), "t.jsonl:3: should be an object with the fields patches"),
        (as_text(" \n"), "t.csv: is empty; a row has the fields patches"),
        (as_text("1,2,3,4\n"), "t.csv:1: the first line should name the columns, patches"),
        (as_text("ms," + HEADER), "t.csv:1: the column ms stands here twice"),
        (as_text(HEADER + "\n1,2,3\n"), "t.csv:3: 3 cells under 4 columns"),
        (as_text(HEADER + "1,2,three,4\n"), "t.csv:2: length_squared: 'three' should be a number"),
        (as_text(HEADER + "1,2,3,nan\n"), "t.csv:2: ms: 'nan' should be a number"),
        (as_text(HEADER + "1,2,3,4\n"), "1 rows are too few for a fit; time at least 200"),
        (as_text(HEADER), "0 rows are too few"),
        (lambda folder: folder / "absent.csv", "absent.csv: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_by_file_line_and_field(
    write: Callable[[Path], Path], words: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "cost.json"
    assert run("fit-cost", write(tmp_path), "--out", out) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert not out.exists()


def test_times_in_the_wrong_unit_do_not_become_a_model(tmp_path: Path, capsys: Capture) -> None:
    made = [in_seconds(row) | {"seconds": row["ms"]} for row in rows()]
    assert run("fit-cost", jsonl(tmp_path / "t.jsonl", made)) == 2
    error = capsys.readouterr().err
    assert "patches_ns: 5" in error
    assert "look at the unit" in error


def test_a_cost_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        '{"model": "fitted", "patches_ns": 1, "patches_squared_ns": 0, '
        '"length_squared_ns": 0, "constant_ns": 0}',
        encoding="utf-8-sig",
    )
    assert load_cost_file(path).patches_fs == 1_000_000


def test_a_refused_fit_leaves_the_last_good_model(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "cost.json"
    assert run("fit-cost", jsonl(tmp_path / "t.jsonl", rows()), "--out", out) == 0
    before = out.read_bytes()
    assert run("fit-cost", jsonl(tmp_path / "t.jsonl", rows()[:150]), "--out", out) == 2
    assert out.read_bytes() == before
    assert run("fit-cost", jsonl(tmp_path / "t.jsonl", rows()), "--out", tmp_path / "no/c") == 2
    assert "no/c: cannot be written: No such file" in capsys.readouterr().err


# ---- the file ------------------------------------------------------------------------------------


def test_a_cost_file_that_cannot_be_read_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.json: cannot be read: .*fit-cost TIMINGS --out"):
        load_cost_file(tmp_path / "c.json")
    (tmp_path / "c.json").write_text('{"model": "fitted"}')
    with pytest.raises(ConfigError, match=r"c\.json: patches_ns: is missing"):
        load_cost_file(tmp_path / "c.json")
