"""`dataservice top`: what one look shows, and the loop in a terminal of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pyte
import pytest
from rich.console import Console
from support.command import run
from support.fake_coordinator import FakeCoordinator, report, session, stager, worker

from dataservice.cli.top_view import view_of

SIZE = (24, 80)


WAITS = {"level": "warning", "text": "Rank 1 waits 50 % of its time for workers", "why": "Because."}


def drawn(
    told: dict[str, Any] | None,
    *,
    trouble: str = "",
    silent_s: float = 0.0,
    width: int = 80,
    height: int = 24,
) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(
            view_of(
                told,
                endpoint="h:7070",
                trouble=trouble,
                silent_s=silent_s,
                width=width,
                height=height,
            )
        )
    return captured.get().splitlines()


# ---- one look ------------------------------------------------------------------------------------


def test_shows_everything_that_is_asked_for() -> None:
    events = [
        {"at_s": 1e9 + i, "kind": "k", "text": f"event {i}", "level": "warning"} for i in range(9)
    ]
    told = report(
        stagers=[stager("n0"), stager("n1", missing_bytes=0)],
        events=events,
        holes=3,
        holes_by_reason={"truncated JPEG": 2, "not a picture": 1},
        worst_shards={"caption/a.jsonl": 3},
        workers=[worker("w0", draining=True), worker("w1", ready_bytes=10 << 20)],
        session=session(4, waited_share=[0.0, 0.5, 0.01, 0.0]),
        verdict=WAITS,
    )
    lines = drawn(told)
    text = "\n".join(lines)
    for words in (
        "vlm | h:7070 | serving | step 12 | 12.0 packs/s | 0.50 steps/s",
        "Rank 1 waits 50 % of its time for workers.",
        "Because.",
        "321",
        "65%",
        "97%",
        "longest rank 1 50%, median 1%, all together 12.8%",
        "w0 (leaves)",
        "10.5 MB",
        "████████",
        "████····",
        "100 s",
        "done",
        "holes: 3 (truncated JPEG 2, not a picture 1); most in caption/a.jsonl: 3",
        "warning: event 8",
        "q ends",
    ):
        assert words in text
    assert "event 0" not in text
    assert lines.index(next(x for x in lines if "event 8" in x)) < lines.index(
        next(x for x in lines if "event 7" in x)
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (120, 50), (80, 12)])
def test_fits_the_terminal_whatever_there_is(width: int, height: int) -> None:
    ranks = 1024
    shares = [0.9 if i == 700 else 0.0 for i in range(ranks)]
    told = report(
        verdict=WAITS | {"text": "long " * 60, "why": "why " * 60},
        workers=[worker(f"worker-{i:08x}") for i in range(512)],
        target_workers=512,
        stagers=[stager(f"n{i}") for i in range(64)],
        events=[{"at_s": i, "kind": "k", "text": "long " * 60, "level": "info"} for i in range(50)],
        session=session(ranks, waited_share=shares),
        worst_shards={"s" * 300: 1},
        holes=1,
    )
    lines = drawn(told, width=width, height=height)
    assert len(lines) <= max(height, 20)  # less than that is no terminal for tables
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "longest rank 700 90%" in text
    assert "▇" in text
    if height >= 16:
        assert "more" in text


def test_a_service_that_is_away_keeps_its_last_look_on_the_screen() -> None:
    text = "\n".join(drawn(report(), trouble="nobody answers at h:7070", silent_s=12.0))
    assert "Last heard 12 s ago: nobody answers at h:7070" in text
    assert "w0" in text
    assert drawn(None) == ["asking h:7070"]
    assert drawn(None, trouble="nobody answers") == ["nobody answers"]


def test_an_opening_service_is_shown_too() -> None:
    text = "\n".join(drawn({"state": "opening", "job": "vlm", "target_workers": 2}))
    assert "vlm | h:7070 | opening" in text
    assert "workers: none of 2 wanted" in text


def test_what_the_service_says_of_itself_is_no_markup() -> None:
    events = [{"at_s": 0, "kind": "k", "text": "[red]x[/red] \x1b[2J", "level": "info"}]
    (line,) = [x for x in drawn(report(events=events)) if "[red]" in x]
    assert "[red]x[/red]" in line
    assert "\x1b" not in line


def test_a_service_that_drains_says_so() -> None:
    assert "drains: no more steps are handed out" in drawn(report(winding_down=True))[0]


# ---- without a terminal --------------------------------------------------------------------------


def test_prints_looks_for_programs_and_pipes(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCoordinator(report()) as fake:
        assert run("top", fake.endpoint, "--json", "--count", 2, "--every-s", 0.2) == 0
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [look["status"]["job"] for look in looks] == ["vlm", "vlm"]
        assert [look["trouble"] for look in looks] == ["", ""]
        assert run("top", fake.endpoint) == 0
        out = capsys.readouterr().out
        assert "No rank is waiting." in out
        assert "q ends" not in out


def test_nobody_at_the_endpoint_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top", "127.0.0.1:1", "--json") == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert run("top", "nowhere") == 2
    assert "is not host:port" in capsys.readouterr().err


# ---- in a terminal -------------------------------------------------------------------------------


class Terminal:
    """What a person sees of a command."""

    def __init__(self, *arguments: str) -> None:
        self.screen = pyte.Screen(SIZE[1], SIZE[0])
        self._stream = pyte.ByteStream(self.screen)
        self._master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, SIZE)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dataservice.cli", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    def until(self, condition: Callable[[str], bool], timeout_s: float = 60.0) -> str:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if select.select([self._master], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._master, 1 << 16))
            text = "\n".join(self.screen.display)
            if condition(text):
                return text
        raise AssertionError("\n".join(self.screen.display))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        until = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < until:
            if select.select([self._master], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._master, 1 << 16))
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    shown = Terminal(*arguments)
    try:
        yield shown
    finally:
        shown.close()


def test_lives_through_a_coordinator_that_goes_and_comes_back_and_ends_with_q() -> None:
    fake = FakeCoordinator(report())
    with fake:
        endpoint = fake.endpoint
    with terminal("top", endpoint, "--every-s", "0.2") as shown:
        with fake:
            shown.until(lambda text: "No rank is waiting." in text and "w1" in text)
            fake.report = report(verdict=WAITS)
            shown.until(lambda text: "Rank 1 waits 50 %" in text)
        assert "w1" in shown.until(lambda text: "Last heard" in text)
        with fake:
            shown.until(lambda text: "Last heard" not in text and "Rank 1 waits" in text)
            shown.press(b"\x1b[A")  # an arrow key
            time.sleep(0.5)
            assert shown.process.poll() is None
            shown.press(b"q")
            assert shown.end() == 0
        assert termios.tcgetattr(shown.slave) == shown.before


def test_ends_with_ctrl_c_while_nobody_answers() -> None:
    with terminal("top", "127.0.0.1:1", "--every-s", "0.2") as shown:
        shown.until(lambda text: "127.0.0.1:1" in text)
        os.killpg(shown.process.pid, 2)
        assert shown.end() == 0
        assert termios.tcgetattr(shown.slave) == shown.before
