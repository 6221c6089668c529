"""`dataservice lint` as a person or a program calls it."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from support.command import run
from support.demo_config import DATA, demo_settings, write_config


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "good.png"
    Image.new("RGB", (40, 30), "blue").save(path)
    return path


def test_json_is_one_object_a_line(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(picture.read_bytes()[:60])
    assert run("lint", "--json", picture) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(picture),
        "kind": "image",
        "outcome": "ok",
        "reason": None,
        "width": 40,
        "height": 30,
    }
    assert run("lint", picture, bad, "--json", "--digest") == 1
    good, rejected = map(json.loads, capsys.readouterr().out.splitlines())
    assert good["mean_rgb"] == [0.0, 0.0, 255.0]
    assert rejected["outcome"] == "rejected" and rejected["reason"].startswith("truncated PNG")
    assert rejected["mean_rgb"] is None


def test_people_get_kinds_of_reasons_and_places(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(7):
        (tmp_path / f"bad{number}.png").write_bytes(picture.read_bytes()[: 50 + number])
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    assert run("lint", tmp_path) == 1
    out = capsys.readouterr().out
    assert out.startswith("2 records, 8 images: 8 rejected\n")
    assert "7 x truncated PNG" in out
    assert f"{tmp_path}/a.jsonl:2" in out
    assert out.count("bad") == 5
    assert run("lint", picture) == 0
    assert capsys.readouterr().out == "1 images: 0 rejected\n"


def test_a_config_is_all_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = demo_settings(tmp_path)
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(b"no zip")
    settings["sources"][1]["images"] = [settings["sources"][1]["images"], str(damaged)]
    config = write_config(tmp_path, settings)
    before = sorted(tmp_path.rglob("*"))
    assert run("lint", config, "--json") == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(tmp_path.rglob("*")) == before
    (archive,) = [row for row in rows if row["kind"] == "zip"]
    assert archive["file"] == str(damaged) and "central directory" in archive["reason"]
    records = [row for row in rows if row["kind"] == "jsonl"]
    assert len(records) == 650
    (bad,) = [row for row in records if row["outcome"] == "rejected"]
    assert "images/cell-081.jpg" in bad["reason"]
    assert Path(bad["file"]).is_relative_to(DATA)


def test_the_rules_of_the_config_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = io.BytesIO()
    Image.new("RGB", (400, 300)).save(stored, "PNG")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("pics/a.png", stored.getvalue())
    turns = [{"from": "human", "value": "<img>?"}, {"from": "gpt", "value": "!"}]
    line = json.dumps({"image": "a.png", "conversations": turns})
    (tmp_path / "a.jsonl").write_text(line + "\n")
    assert run("lint", tmp_path / "a.jsonl") == 1
    source = {
        "name": "a",
        "records": str(tmp_path / "a.jsonl"),
        "placeholder": "<img>",
        "add_prefix": "pics/",
    }
    settings = demo_settings(tmp_path) | {"sources": [source]}
    config = write_config(tmp_path, settings)
    capsys.readouterr()
    assert run("lint", config) == 0, capsys.readouterr().out
    settings["workers"] |= {"max_image_pixels": 1000}
    assert run("lint", write_config(tmp_path, settings)) == 1
    assert "too many pixels: PNG of 400x300, the limit is 1000" in capsys.readouterr().out


INTERNVL = {"a": {"root": "pics", "annotation": "a.jsonl", "repeat_time": 2, "length": 9}}
ONEVISION = "datasets:\n  - {json_path: a.jsonl, sampling_strategy: 'first:1'}\n"
ENERGON = """\
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: a.jsonl, weight: 1, aux: {media: filesystem://pics}}
      - {path: b.jsonl, weight: 2}
"""


@pytest.mark.parametrize(
    ("name", "content", "places", "bad"),
    [
        ("meta.json", json.dumps(INTERNVL), (), ["a.jsonl:2"]),
        ("mix.yaml", ONEVISION, ("--images", "pics"), ["a.jsonl:2"]),
        ("mix.yml", ENERGON, (), ["a.jsonl:2", "b.jsonl:1"]),
    ],
)
def test_a_mixture_is_what_it_names(
    tmp_path: Path,
    picture: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    places: tuple[str, ...],
    bad: list[str],
) -> None:
    (tmp_path / "pics").mkdir()
    picture.rename(tmp_path / "pics" / "a.png")
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "!"}]
    lines = [json.dumps({"image": image, "conversations": turns}) for image in ("a.png", "b.png")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text('{"nothing": 1}\n{"text": "b"}\n')
    (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert run("lint", name, "--json", *places) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [f"{row['file']}:{row['line']}" for row in rows if row["outcome"] == "rejected"]
    assert found == [str(tmp_path / place) for place in bad]
    assert run("lint", name, "a.jsonl") == 2
    assert f"{name}: a mixture names its files; lint it alone" in capsys.readouterr().err


def test_a_mixture_with_a_credential_is_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {"root": "", "annotation": "https://me:secret@host/a.jsonl"}
    (tmp_path / "meta.json").write_text(json.dumps({"a": part}))
    assert run("lint", tmp_path / "meta.json") == 2
    err = capsys.readouterr().err
    assert "this URL holds a credential" in err
    assert "secret" not in err and "Traceback" not in err


@pytest.mark.parametrize(
    "text",
    ['{"text": "a"}\n{"text": "b"}\n', '[{"annotation": {}}]', '{"a": ' * 9000, '{"text": {}}'],
)
def test_a_record_file_is_no_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert run("lint", tmp_path / "a.json", "--json") in (0, 1)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["file"] for row in rows} == {str(tmp_path / "a.json")}


def test_what_cannot_run_exits_with_2(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("lint", tmp_path / "none.png") == 2
    config = write_config(tmp_path, demo_settings(tmp_path))
    assert run("lint", config, picture) == 2
    assert run("lint", config, "--images", tmp_path) == 2
    err = capsys.readouterr().err
    assert "no such file" in err and "lint it alone" in err and "Traceback" not in err
