"""`dataservice preview`: the packs that the plan has, as pages, without a service."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import pytest
import yaml
from PIL import Image
from support.command import run
from support.demo_config import demo_settings, write_config

HOSTILE = "</div><script>alert(1)</script>"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: hostile text, and four records with a picture each, one of them damaged."""
    folder = tmp_path_factory.mktemp("preview")
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} {HOSTILE}"}) + "\n" for i in range(8))
    )
    records = []
    with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
        for i in range(4):
            data = io.BytesIO()
            Image.new("RGB", (56, 28), (200, 40 * i, 0)).save(data, "PNG")
            whole = data.getvalue()
            archive.writestr(f"{i}.png", whole[:-30] if i == 2 else whole)
            records.append({"image": f"{i}.png", "caption": f"picture {i}"})
    (folder / "pictures.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    settings = demo_settings(
        folder, plan={"pack_length": 512, "lanes": 1, "window": 16}, staging={"cache_dir": None}
    )
    settings["sources"] = [
        {"name": "text", "records": str(folder / "text.jsonl")},
        {
            "name": "pictures",
            "records": str(folder / "pictures.jsonl"),
            "images": str(folder / "pictures.zip"),
        },
    ]
    return write_config(folder, settings)


def test_packs_are_those_of_the_plan_and_shown_whole(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--dp-size", 1, "--micro-steps", 1)
    assert run("plan", config, "--steps", "0:1", *grid, "--json") == 0
    (planned,) = (
        json.loads(line)["cells"][0]["packs"] for line in capsys.readouterr().out.splitlines()
    )
    out = tmp_path / "out"
    assert run("preview", config, *grid, "--out", out, "--json") == 0
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    same = ("pack_id", "number", "cost", "tokens", "loss_tokens", "num_images", "sample_keys")
    holes = [hole for row in rows for hole in row["holes"]]
    assert len(holes) == 1 and "2.png" in holes[0]
    for row, plan in zip(rows, planned, strict=True):
        lost = {"loss_tokens"} if row["holes"] else set()
        assert {n: row[n] for n in same if n not in lost} == {
            n: plan[n] for n in same if n not in lost
        }
    assert f"written: {out / 'index.html'}" in told.err
    assert json.loads((out / "preview.json").read_text())["packs"] == rows
    page = (out / f"{rows[0]['file']}.html").read_text()
    assert page.count("<img ") == rows[0]["num_images"] == 4
    assert page.count('<b class="lost"') == 1  # the bar's piece of the sample with the hole
    assert page.count("<b ") == len(rows[0]["sample_keys"])
    assert f"hole: {holes[0]}" in page
    bar = page[page.index('<div class="strip"') : page.index("<section>")]
    shares = [float(share) for share in re.findall(r'<b[^>]* style="width:([\d.]+)%"', bar)]
    assert sum(shares) == pytest.approx(100 * rows[0]["tokens"] / 512, abs=0.1)
    for piece in bar.split("<b")[1:]:
        parts = [float(part) for part in re.findall(r'<u [^>]*width:([\d.]+)%"', piece)]
        assert sum(parts) == pytest.approx(100, abs=0.1)
    assert "alert(1)" in re.sub(r"<[^>]*>", "", page) and "<script" not in page
    index = (out / "index.html").read_text()
    assert f'href="{rows[0]["file"]}.html"' in index and "<script" not in index
    assert not list(out.glob("*.npz"))


def test_no_more_packs_than_wanted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ("preview", config, "--dp-size", 2, "--micro-steps", 2, "--out", out)
    assert run(*given, "--packs", 3) == 0
    told = capsys.readouterr()
    assert "steps 0:1: 3 packs, built here" in told.out
    assert "the first 3 packs; --packs shows more" in told.err
    assert len(list(out.glob("step*.html"))) == 3
    assert run(*given, "--rank", 1, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["micro_step"], row["dp_rank"]) for row in rows] == [(0, 1), (1, 1)]


def test_a_lazy_index_is_counted_as_far_as_it_is_shown(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--dp-size", 1, "--micro-steps", 1, "--json", "--out")
    assert run("preview", config, *given, tmp_path / "full") == 0
    full = capsys.readouterr().out
    lazy = tmp_path / "lazy.yaml"
    settings = yaml.safe_load(config.read_text())
    settings |= {"index": "lazy", "index_dir": str(tmp_path / "index")}
    lazy.write_text(yaml.safe_dump(settings))
    assert run("preview", lazy, *given, tmp_path / "lazy") == 0
    assert capsys.readouterr().out == full


def test_what_is_not_there_is_said(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    assert run("preview", config, "--dp-size", 2, "--rank", 2, *out) == 2
    assert "--rank 2: with 2 they are 0 to 1" in capsys.readouterr().err
    assert run("preview", config, "--dp-size", 1, "--steps", "90:91", *out) == 2
    assert "the plan ends before step 90" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run("preview", config, "--dp-size", 1, "--out", tmp_path / "file") == 2
    assert "--out" in capsys.readouterr().err
