"""The command line itself: exit codes, errors in one paragraph, what is missing, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.command import run

from dataservice.cli import data_commands
from dataservice.cli.app import app


def raised(error: BaseException) -> Callable[..., None]:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise error

    return fails


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["index", str(tmp_path / "none.yaml")]
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    arguments.insert(place, "--debug")
    assert run(*arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told and told.endswith(err)


def test_an_error_of_its_own_is_one_paragraph_and_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = KeyError("two\nlines of s3://user:secret@bucket/x")
    monkeypatch.setattr("dataservice.config.load_config", raised(error))
    assert run("index", tmp_path / "a.yaml") == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err and "secret" not in err
    assert err.startswith("error: dataservice itself failed: KeyError: ")
    assert "(test_app.py, line " in err and "--debug" in err
    assert run("index", tmp_path / "a.yaml", "--debug") == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupted_is_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dataservice.config.load_config", raised(KeyboardInterrupt()))
    assert run("index", tmp_path / "a.yaml") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    for code in ("Exit codes: 0", " 1: ", " 2: ", " 70: ", " 130: "):
        assert code in told
    assert run("lint", "--help") == 0
    assert "Exits with 1 when something is rejected" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["plan"], "CONFIG, --steps, --dp-size and --micro-steps"),
        (["plan", "a.yaml", "--dp-size", "4"], "--steps and --micro-steps"),
        (["simulate", "--synthetic", "text80"], "--dp-size and --micro-steps"),
        (["replay", "a.yaml"], "--state and --step"),
    ],
)
def test_all_that_is_missing_is_named_at_once(
    arguments: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert f"error: {arguments[0]} needs {missing}, too; " in told.err
    assert told.err.count("\n") == 1 and not told.out
    assert run(arguments[0], "--help") == 0


def test_one_that_is_missing_and_a_wrong_one_are_said_as_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("plan", "a.yaml", "--steps", "0:1", "--dp-size", 4) == 2
    assert "Missing option '--micro-steps'" in capsys.readouterr().err
    assert run("plan", "--nothing") == 2
    assert "No such option" in capsys.readouterr().err


_SCRIPT = "import sys; sys.argv = ['dataservice']; from dataservice import command; command.main()"


def completed(words: str, number: int) -> list[str]:
    """What a shell is given to complete word `number`."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={
            **os.environ,
            "_DATASERVICE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(number),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    names = {found for found in completed("dataservice ", 1) if not found.startswith("-")}
    group = typer.main.get_command(app)
    assert names == set(group.commands)  # type: ignore[attr-defined]
    assert completed("dataservice plan --mic", 2) == ["--micro-steps"]
    assert data_commands.lint.__name__ in completed("dataservice li", 1)
