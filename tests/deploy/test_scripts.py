"""Shell scripts, YAML and the Dockerfile pass their linters; a missing one is a visible skip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[str]:
    """Files that git has or would take, below the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def run(*command: str) -> str:
    """What it found; "" for nothing."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""


def tool(name: str) -> str:
    """Beside Python or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: deploy/install_validators.sh, or pip install .[test]")
    return found


def test_shell_scripts_are_clean() -> None:
    scripts = [*tracked("*.sh", "*.sbatch"), ".ci/run"]
    assert len(scripts) >= 7
    assert run(tool("shellcheck"), "--shell=bash", *scripts) == ""


def test_shell_scripts_stop_at_errors_and_can_be_run() -> None:
    for name in tracked("deploy/*.sh", "deploy/**/*.sh"):
        text = (ROOT / name).read_text()
        assert text.startswith("#!/usr/bin/env bash\n#"), name  # and then says what it is
        assert "\nset -euo pipefail\n" in text, name
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_yaml_is_clean() -> None:
    files = tracked("*.yaml", "*.yml")
    assert len(files) >= 20
    assert run(tool("yamllint"), "--strict", "-c", ".yamllint.yaml", *files) == ""


def test_the_dockerfile_is_clean() -> None:
    assert run(tool("hadolint"), "deploy/docker/Dockerfile") == ""


@pytest.mark.parametrize(
    ("linter", "text"),
    [
        (("shellcheck", "--shell=bash"), "cd $1\n"),
        (("yamllint", "--strict", "-c", ".yamllint.yaml"), "a: 1\na: 2\n"),
        (("hadolint",), "FROM python:latest\nRUN cd /tmp && pip install torch\n"),
    ],
)
def test_the_linters_find_something(tmp_path: Path, linter: tuple[str, ...], text: str) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(text)
    name, *options = linter
    assert str(wrong) in run(tool(name), *options, str(wrong))
