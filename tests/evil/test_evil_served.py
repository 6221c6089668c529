"""A run that is served from sources made of every file of a folder of hostile files."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evil.expectations import (
    MEMBER_WORDS,
    check_line,
    check_mean,
    check_reason,
    entries,
    needs_files,
    path_of,
)
from support.demo_config import demo_settings, write_config
from support.local_service import LocalService

from dataservice.config import Config, load_config
from dataservice.core.vision import target_size
from dataservice.indexing import update_index
from trainer_client import PackStream, ParallelLayout

pytestmark = needs_files

PATCH, MERGE, MIN_PIXELS, MAX_PIXELS = 14, 2, 28 * 28 * 4, 28 * 28 * 64
BLUR = 2.5
"""What a resize to few pixels may change a mean by, besides the manifest's tolerance."""
_NO_FILES: list[dict[str, Any]] = [{"file": "none", "expect": {}}]


@dataclass
class Outcome:
    """Of one record: why it was not delivered whole, or its pictures."""

    reason: str | None = None
    pictures: tuple[np.ndarray, ...] = ()
    """uint8 [height, width, 3], as resized for the model."""


Outcomes = dict[tuple[str, str, int], Outcome]
"""By source, file and line."""


def record(name: str) -> str:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
    return json.dumps({"image": name, "conversations": turns}) + "\n"


def names_in(entry: dict[str, Any]) -> list[str]:
    """The members of an archive that the manifest speaks of."""
    expect = entry["expect"]
    names = [*expect.get("readable", {}), *expect.get("unreadable", {})]
    if "every member" in names:
        with zipfile.ZipFile(path_of(entry)) as archive:
            names = archive.namelist()
    return names or ["images/a.png"]


def write_sources(folder: Path) -> list[dict[str, Any]]:
    pictures = [path_of(entry) for entry in entries("images/")]
    lines = "".join(record(f"images/{path.name}") for path in pictures)
    (folder / "plain.jsonl").write_text(lines)
    (folder / "zipped.jsonl").write_text(lines)
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        for number, path in enumerate(pictures):
            method = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
            archive.write(path, f"images/{path.name}", compress_type=method)
    (folder / "archives").mkdir()
    for entry in entries("zips/"):
        path = folder / "archives" / path_of(entry).name
        shutil.copy(path_of(entry), path)
        path.with_suffix(".jsonl").write_text("".join(map(record, names_in(entry))))
    root = path_of({"file": ""})
    return [
        {"name": "plain", "records": str(folder / "plain.jsonl"), "images": str(root)},
        {"name": "zipped", "records": str(folder / "zipped.jsonl")},
        {"name": "archives", "records": str(folder / "archives" / "*.jsonl")},
        {
            "name": "lines",
            "records": str(root / "jsonl" / "*.jsonl"),
            "images": str(root / "jsonl" / "images.zip"),
        },
    ]


def unpatched(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """uint8 [height, width, 3] of a picture's patches."""
    blocks = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, PATCH, PATCH)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * PATCH, columns * PATCH, 3)


def delivered(config: Config) -> Iterator[tuple[str, Outcome]]:
    """By sample key, from real workers, to the end of the data."""
    with (
        LocalService(config, workers=2) as service,
        PackStream(
            service.endpoint,
            job=config.job,
            layout=ParallelLayout.data_parallel(0, 1),
            micro_steps=1,
            timeout_s=60,
        ) as stream,
    ):
        for batch in stream:
            (keys,) = batch.meta["sample_keys"]
            pictures: list[list[np.ndarray]] = [[] for _ in keys]
            start = 0
            grids = batch["image_grid_thw"].tolist()
            for item, (_, rows, columns) in zip(
                batch["image_doc_ids"].tolist(), grids, strict=True
            ):
                patches = batch["pixel_values"][start : start + rows * columns].numpy()
                pictures[item].append(unpatched(patches, rows, columns))
                start += rows * columns
            holes = dict(hole.split(": ", 1) for hole in batch.meta["holes"])
            for key, own in zip(keys, pictures, strict=True):
                why = [reason for hole, reason in holes.items() if hole.startswith(key + "#")]
                yield key, Outcome(why[0] if why else None, tuple(own))


def places(source: dict[str, Any], root: Path) -> Iterator[tuple[str, int, str]]:
    """File, line and sample key of each line of a source."""
    for path in sorted(Path("/").glob(source["records"].lstrip("/"))):
        offset = 0
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            bom = 3 * line.startswith(b"\xef\xbb\xbf")
            yield str(path), number, f"{source['name']}/{path.name}@{offset + bom}"
            offset += len(line) + 1


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("evil")
    settings = demo_settings(folder)
    settings |= {
        "sources": write_sources(folder),
        "vision": {
            "patch": PATCH,
            "merge": MERGE,
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
        },
        "errors": {"max_hole_share": 1.0, "max_holes_in_a_row": 1000},
    }
    config = load_config(str(write_config(folder, settings)))
    report = update_index(config)
    rejected = {}
    for line in Path(report.rejected_path).read_text().splitlines():
        row = json.loads(line)
        rejected[row["file"], row["line"]] = row["reason"]
    assert len(rejected) == report.num_rejected
    served = dict(delivered(config))
    found: Outcomes = {}
    for source in settings["sources"]:
        for file, line, key in places(source, folder):
            if (file, line) in rejected:
                assert key not in served
                found[source["name"], Path(file).name, line] = Outcome(rejected[file, line])
            elif key in served:
                found[source["name"], Path(file).name, line] = served.pop(key)
    assert not served
    return found


def check_pixels(pixels: np.ndarray, expect: dict[str, Any]) -> None:
    decoded = expect.get("if_decoded", expect)
    loose = {**decoded, "tolerance": decoded.get("tolerance", 3) + BLUR}
    if "width" in decoded:
        tall, wide = target_size(
            decoded["height"],
            decoded["width"],
            patch=PATCH,
            merge=MERGE,
            min_pixels=MIN_PIXELS,
            max_pixels=MAX_PIXELS,
        )
        assert pixels.shape == (tall, wide, 3)
    check_mean(pixels.mean(axis=(0, 1)).tolist(), loose)
    middle, centre = pixels.shape[0] // 2, pixels.shape[1] // 2
    for name, wanted in decoded.get("quadrant_mean_rgb", {}).items():
        rows = slice(0, middle) if "top" in name else slice(middle, None)
        columns = slice(0, centre) if "left" in name else slice(centre, None)
        off = np.abs(pixels[rows, columns].mean(axis=(0, 1)) - wanted).max()
        assert off <= loose["tolerance"], (name, off)


@pytest.mark.parametrize("source", ["plain", "zipped"])
@pytest.mark.parametrize(
    "number", range(len(entries("images/"))), ids=[e["file"] for e in entries("images/")]
)
def test_pictures(source: str, number: int, outcomes: Outcomes) -> None:
    expect = entries("images/")[number]["expect"]
    outcome = outcomes[source, f"{source}.jsonl", number + 1]
    if outcome.reason is not None:
        assert "reject" in expect["outcome"], outcome.reason
        if "reason_says" in expect:
            check_reason(outcome.reason, expect["reason_says"])
        return
    assert "decode" in expect["outcome"]
    (pixels,) = outcome.pictures
    check_pixels(pixels, expect)


@pytest.mark.parametrize("entry", entries("zips/") or _NO_FILES, ids=lambda e: str(e["file"]))
def test_archives(entry: dict[str, Any], outcomes: Outcomes) -> None:
    expect = entry["expect"]
    name = path_of(entry).with_suffix(".jsonl").name
    for line, member in enumerate(names_in(entry), 1):
        outcome = outcomes["archives", name, line]
        if member in expect.get("readable", {}) or "candidates" in expect:
            assert outcome.reason is None
            assert outcome.pictures[0].std() > 5
            continue
        assert outcome.reason is not None
        why = expect.get("unreadable", {})
        why = why.get(member) or why.get("every member")
        if expect["outcome"] == "reject":
            check_reason(outcome.reason, expect["reason_says"])
        elif why:
            words = next(words for pattern, words in MEMBER_WORDS if re.search(pattern, why))
            assert re.search(words, outcome.reason)


@pytest.mark.parametrize("entry", entries("jsonl/") or _NO_FILES, ids=lambda e: str(e["file"]))
def test_lines(entry: dict[str, Any], outcomes: Outcomes) -> None:
    path = path_of(entry)
    if path.suffix == ".zip":
        pytest.skip("the pictures of the others")
    lines = [line for source, file, line in outcomes if (source, file) == ("lines", path.name)]
    assert sorted(lines) == [wanted["line"] for wanted in entry["expect"]["lines"]]
    for wanted in entry["expect"]["lines"]:
        outcome = outcomes["lines", path.name, wanted["line"]]
        check_line("ok" if outcome.reason is None else "rejected", outcome.reason, wanted)
        assert all(pixels.std() > 5 for pixels in outcome.pictures)
