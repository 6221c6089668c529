"""The manifest of a folder of hostile files, and whether what was found fits it.

DATASERVICE_EVIL names the folder. Its manifest.json lists each file with an `expect`: "decode",
"reject", either of them, "open" (an archive) or "lines" (a JSONL file).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

EVIL = os.environ.get("DATASERVICE_EVIL")
needs_files = pytest.mark.skipif(EVIL is None, reason="DATASERVICE_EVIL names no folder")

WORDS = {
    "truncated": "truncated",
    "corrupt": "corrupt",
    "too many pixels": "too many pixels",
    "too many pixels or truncated": "too many pixels|truncated",
    "not an image": "not an image",
    "empty": "empty",
    "unsupported format": "unsupported format",
    "no pixels": "no pixels",
    "truncated or no central directory": "truncated|no central directory",
    "split archive": "split archive",
}
"""What the reason must say, by the manifest's kind of reason."""
MEMBER_WORDS = (
    (r"encrypted.*method 99|encrypted", "encrypted|method 99"),
    ("unsafe name|as above", "unsafe|leaves its root"),
    ("method 9,", "method 9\\b|corrupt"),
    ("CRC", "CRC"),
    ("size limit", "size limit"),
    ("size mismatch", "size mismatch"),
)
LINE_WORDS = (
    ("JSON", "JSON"),
    ("UTF-8", r"UTF-8 at byte \d+"),
    ("names the field", "field|record must be|record 0 of a list must be"),
    ("no such member", r"no such image.*nowhere\.(png|jpg)"),
    ("2 placeholders, 1 image", "^2 placeholders.* 1 image"),
    ("1 placeholder, 2 images", "^1 placeholder.* 2 images"),
    ("1 placeholder, no image", "^1 placeholder.* no image"),
    ("nested too deep", "nested too deep"),
)


def entries(folder: str = "") -> list[dict[str, Any]]:
    """Of the manifest, those below `folder`; none where there is no manifest."""
    if EVIL is None:
        return []
    manifest = json.loads((Path(EVIL) / "manifest.json").read_text())
    return [entry for entry in manifest["files"] if entry["file"].startswith(folder)]


def path_of(entry: dict[str, Any]) -> Path:
    return Path(EVIL or "") / entry["file"]


def check_reason(reason: str, wanted: str) -> None:
    assert re.search(WORDS[wanted], reason), f"{reason!r} does not say {wanted!r}"


def check_mean(mean: list[float], expect: dict[str, Any]) -> None:
    """Mean colour, where the manifest says one."""
    if "mean_rgb" in expect:
        wanted = [expect["mean_rgb"]]
    else:
        wanted = list(expect.get("mean_rgb_any_of", {}).values())
    off = [
        max(abs(a - b) for a, b in zip(mean, one, strict=True)) <= expect["tolerance"]
        for one in wanted
    ]
    assert any(off) or not wanted, f"mean {mean}, expected {wanted}"


def check_picture(row: dict[str, Any], expect: dict[str, Any]) -> None:
    """A finding, or what a served run made of the picture in the same words."""
    if row["outcome"] == "rejected":
        assert "reject" in expect["outcome"], row["reason"]
        if "reason_says" in expect:
            check_reason(row["reason"], expect["reason_says"])
        return
    assert row["outcome"] == "ok" and "decode" in expect["outcome"]
    decoded = expect.get("if_decoded", expect)
    if "width" in decoded:
        assert (row["width"], row["height"]) == (decoded["width"], decoded["height"])
    check_mean(row["mean_rgb"], decoded)


def check_archive(rows: list[dict[str, Any]], expect: dict[str, Any]) -> None:
    """The findings of a zip: one of the archive, then its members'."""
    archive, *members = rows
    assert archive["member"] is None
    if expect["outcome"] == "reject":
        assert archive["outcome"] == "rejected" and not members
        check_reason(archive["reason"], expect["reason_says"])
        return
    assert archive["outcome"] == "ok" and archive["reason"] is None
    by_name = {row["member"]: row for row in members}
    for name, wanted in expect.get("readable", {}).items():
        row = by_name[name]
        assert (row["outcome"], row["size"]) == ("ok", wanted["bytes"]), row
        assert row["sha256"] == wanted["sha256"]
    for name, why in expect.get("unreadable", {}).items():
        words = next(words for pattern, words in MEMBER_WORDS if re.search(pattern, why))
        bad = members if name == "every member" else [by_name[name]]
        assert bad
        for row in bad:
            assert row["outcome"] == "rejected" and re.search(words, row["reason"]), row
    if "candidates" in expect:
        good = {row["sha256"] for row in members if row["outcome"] == "ok"}
        assert len(good) <= 1 and good <= set(expect["candidates"].values())


def check_line(outcome: str, reason: str | None, wanted: dict[str, Any]) -> None:
    """`outcome` is "ok" or "rejected"."""
    assert {"ok": "sample", "rejected": "reject"}[outcome] in wanted["outcome"], reason
    if wanted["outcome"] == "reject":
        words = next(words for pattern, words in LINE_WORDS if pattern in wanted["why"])
        assert reason and re.search(words, reason), f"{reason!r} does not say {wanted['why']!r}"
