"""Ray's own token is set on purpose wherever this project starts Ray, and missed where it joins."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from dataservice.actors.ray_local import ray_environment, warn_of_open_cluster

ROOT = Path(__file__).resolve().parents[2]
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As of somebody who knows nothing of Ray's token."""
    for name in TOKEN_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_ray_of_our_own_has_a_token_of_its_own(shell: pytest.MonkeyPatch) -> None:
    ray_environment()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert re.fullmatch("[0-9a-f]{64}", first)
    shell.delenv("RAY_AUTH_TOKEN")
    ray_environment()
    assert os.environ["RAY_AUTH_TOKEN"] != first


@pytest.mark.parametrize("name", TOKEN_VARIABLES[1:])
def test_a_token_that_is_given_is_kept(shell: pytest.MonkeyPatch, name: str) -> None:
    shell.setenv(name, "given")
    ray_environment()
    assert os.environ[name] == "given"
    assert sum(other in os.environ for other in TOKEN_VARIABLES[1:]) == 1


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_a_cluster_without_a_token_is_warned_of(
    shell: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str | None
) -> None:
    if mode is not None:
        shell.setenv("RAY_AUTH_MODE", mode)
    with caplog.at_level(logging.WARNING):
        warn_of_open_cluster("10.0.0.1:6379")
    said = "start every node with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in caplog.text
    assert said == (mode != "token")


def test_ray_is_started_and_joined_in_one_place() -> None:
    starts = re.compile(r"\bray\.init\(|\bCluster\(\s*initialize_head")
    packages = [ROOT / name for name in ("dataservice", "trainer_client", "benchmarks", "deploy")]
    found = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in package.rglob("*.py")
        if starts.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"dataservice/actors/ray_local.py"}


def test_scripts_that_start_ray_set_its_token() -> None:
    scripts = [
        path
        for path in (ROOT / "deploy").rglob("*")
        if path.suffix in (".sh", ".sbatch") and re.search(r"\bray start\b", path.read_text())
    ]
    assert scripts
    assert [path.name for path in scripts if "RAY_AUTH" not in path.read_text()] == []
