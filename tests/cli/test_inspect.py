"""`dataservice inspect`: a record from end to end, a file as a whole, and where the plan has it."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.command import run
from support.demo_config import demo_settings, write_config

PICTURES = {"wide.png": (280, 56), "cut.png": (84, 84)}
RECORDS = [
    {"image": "wide.png", "caption": "a wide one"},
    {"image": "cut.png", "caption": "a damaged one"},
    {"image": "gone.png", "caption": "a missing one"},
    {
        "messages": [
            {"role": "user", "content": "x" * 900},
            {"role": "assistant", "content": "\x1b"},
        ]
    },
    {"text": 5},
]
LAYOUTS = {"caption": 2, "messages": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, size in PICTURES.items():
            data = io.BytesIO()
            Image.new("RGB", size, (9, 9, 200)).save(data, "PNG")
            archive.writestr(name, data.getvalue()[: -40 if name == "cut.png" else None])
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (folder / "a.jsonl").write_text(lines + "{broken\n")
    settings = demo_settings(
        folder, plan={"pack_length": 512, "lanes": 1, "window": 8}, staging={"cache_dir": None}
    )
    settings["sources"] = [{"name": "own", "records": str(folder / "a.jsonl")}]
    return write_config(folder, settings)


def told(capsys: pytest.CaptureFixture[str], *given: object, code: int = 0) -> dict[str, Any]:
    assert run("inspect", *given, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_record_is_shown_from_end_to_end(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, config, "own/a.jsonl@0")
    assert (found["outcome"], found["layout"], found["line"]) == ("ok", "caption", 1)
    (image,) = found["images"]
    with zipfile.ZipFile(config.parent / "a.zip") as archive:
        member = archive.getinfo("wide.png")
        crc = zlib.crc32(archive.read("wide.png"))
    assert (image["width"], image["height"]) == PICTURES["wide.png"]
    assert (image["planned_width"], image["planned_height"]) == (280, 56)
    assert image["patches"] == 20 * 4 and image["tokens"] == 20 * 4 // 4
    assert image["stored_bytes"] == member.compress_size
    assert (image["size_bytes"], image["crc32"]) == (member.file_size, f"{crc:08x}")
    assert image["member"] == "wide.png" and image["offset"] == member.header_offset
    assert image["file"] == str(config.parent / "a.zip")
    tokens = found["tokens"]
    assert tokens["image_tokens"] == image["tokens"] and tokens["patches"] == image["patches"]
    assert found["places"] is None
    # the index, which was not there, was not made
    assert not (config.parent / "index").exists()
    assert run("inspect", config, f"{config.parent / 'a.jsonl'}:1") == 0
    text = capsys.readouterr().out
    for said in ("layout caption", "deflated in its archive", "280 x 56 pixels", "decodes"):
        assert said in text
    assert f"{tokens['length']:,} tokens" in text and f"cost {tokens['cost']:,}" in text


def test_what_is_wrong_is_said_and_is_exit_code_1(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config.parent / "a.jsonl"
    cut = told(capsys, config, f"{file}:2", code=1)
    assert cut["reason"].startswith("image 0: ") and cut["images"][0]["reason"] in cut["reason"]
    assert cut["images"][0]["outcome"] == "rejected" and cut["tokens"]["length"] > 0
    assert "gone.png" in told(capsys, config, f"{file}:3", code=1)["reason"]
    odd = told(capsys, config, f"{file}:5", code=1)
    assert "text" in odd["reason"] and odd["tokens"] is None
    broken = told(capsys, config, f"{file}:6", code=1)
    assert broken["turns"] is None and broken["tokens"] is None and broken["layout"] is None
    for line in range(2, 7):
        assert run("inspect", config, f"{file}:{line}") == (0 if line == 4 else 1)
        assert "Traceback" not in capsys.readouterr().err


def test_long_texts_are_cut_and_control_characters_shown(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", config, f"{config.parent / 'a.jsonl'}:4") == 0
    out = capsys.readouterr().out
    assert "300 more characters" in out and "x" * 601 not in out
    assert "\x1b" not in out and "\u241b" in out
    found = told(capsys, config, f"{config.parent / 'a.jsonl'}:4")
    assert found["turns"][0]["pieces"] == ["x" * 900]
    assert found["tokens"]["length"] > 512
    assert "longer than a pack of 512 tokens: split into pieces" in out


def test_a_file_is_summed_up(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, config, config.parent / "a.jsonl", code=1)
    assert (found["records"], found["rejected"], found["num_images"]) == (6, 3, 2)
    assert found["layouts"] == LAYOUTS
    assert {reason["line"] for reason in found["reasons"]} == {3, 5, 6}
    assert found["images_in"] == {str(config.parent / "a.zip"): 2}
    one = [told(capsys, config, f"own/a.jsonl:{n}", code=n == 2) for n in (1, 2, 4)]
    lengths = [of["tokens"]["length"] for of in one]
    assert found["tokens"]["longest"] == max(lengths)
    assert found["tokens"]["longest_line"] == 4 and found["tokens"]["over_pack"] == 1
    sums = found["tokens"]["text_tokens"] + found["tokens"]["image_tokens"]
    assert sums == sum(lengths)
    assert found["tokens"]["median"] == sorted(lengths)[1]
    assert run("inspect", config, "a.jsonl") == 1
    assert "6 records: 2 caption, 1 messages; 3 rejected" in capsys.readouterr().out


def test_an_archive_is_summed_up(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / "a.zip"
    found = told(capsys, config, path)
    with zipfile.ZipFile(path) as archive:
        sizes = [member.file_size for member in archive.infolist()]
    assert (found["members"], found["unpacked_bytes"]) == (2, sum(sizes))
    assert found["stored_as"] == {"deflated in its archive": 2} and found["num_bad"] == 0
    assert run("inspect", config, "a.zip") == 0
    assert "2 members" in capsys.readouterr().out
    whole = path.read_bytes()
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1
    try:
        path.write_bytes(encrypted)
        found = told(capsys, config, path, code=1)
        assert [bad["member"] for bad in found["bad"]] == ["wide.png"]
        assert "encrypted" in found["bad"][0]["reason"]
        path.write_bytes(whole[:-30])
        assert told(capsys, config, path, code=1)["reason"]
        assert run("inspect", config, path) == 1
        assert "cannot be used: " in capsys.readouterr().out
    finally:
        path.write_bytes(whole)


def test_places_are_those_of_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--dp-size", 1, "--micro-steps", 1)
    assert run("plan", config, "--steps", "0:1", *grid, "--json") == 0
    (step,) = map(json.loads, capsys.readouterr().out.splitlines())
    keys = [key for pack in step["cells"][0]["packs"] for key in pack["sample_keys"]]
    own = [key for key in keys if key.partition("[")[0] == keys[0].partition("[")[0]]
    found = told(capsys, config, own[0], "--steps", "0:1", *grid)
    assert [place["sample_key"] for place in found["places"]] == own
    assert found["places"][0]["pack_id"] == step["cells"][0]["packs"][0]["pack_id"]
    assert run("inspect", config, own[0], "--steps", "0:1", *grid) == 0
    assert "step 0, micro-step 0, rank 0: pack 0.0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "more", "message"),
    [
        ("nothing.jsonl", (), "no source has such a record file; give SOURCE/FILE@OFFSET"),
        ("own/a.jsonl@3", (), "there is no record at offset 3"),
        ("own/a.jsonl:99", (), "there is no record on line 99"),
        ("own/a.jsonl", ("--steps", "0:1"), "is a file; name a record"),
    ],
)
def test_what_is_not_there_is_said(
    config: Path,
    what: str,
    more: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("inspect", config, what, *more) == 2
    assert message in capsys.readouterr().err
