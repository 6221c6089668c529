"""deploy/audit.sh: what it says and ends with, for each kind of answer of pip-audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {
    "name": "bad",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}],
}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}


def audit(folder: Path, packages: list[dict[str, Any]] | None) -> tuple[int, str]:
    """With a pip-audit that reports `packages`; None: that has no answer."""
    report = folder / "report.json"
    report.write_text(json.dumps({"dependencies": packages, "fixes": []}))
    python = folder / "python"
    answer = "echo 'no network' >&2; exit 1"
    if packages is not None:
        copies = f'while [ "$1" != --output ]; do shift; done; cp {report} "$2"'
        answer = f"{copies}; exit {int(BAD in packages)}"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip_audit ]; then {answer}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    ended = subprocess.run(
        [ROOT / "deploy" / "audit.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([GOOD], 0, "no known vulnerability in 1 packages"),
        ([GOOD, BAD], 1, "bad 1.0: PYSEC-1, fixed in 1.1"),
        ([GOOD, UNKNOWN], 0, "1 packages looked at; NOT AUDITED: unknown"),
        ([UNKNOWN], 0, "NOT AUDITED: the index has no advisories for any of 1 packages"),
        ([UNKNOWN, BAD], 1, "1 packages of requirements.lock are vulnerable"),
        (None, 0, "NOT AUDITED: pip-audit has no answer: no network"),
    ],
)
def test_every_answer_has_its_words(
    tmp_path: Path, packages: list[dict[str, Any]] | None, code: int, words: str
) -> None:
    ended, said = audit(tmp_path, packages)
    assert words in said
    assert ended == code


def test_the_whole_check_audits() -> None:
    assert "step deploy/audit.sh\n" in (ROOT / ".ci" / "run").read_text()
