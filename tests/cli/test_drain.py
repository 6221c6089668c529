"""`dataservice drain`: what it asks, waits for and says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from support.command import run
from support.fake_coordinator import FakeCoordinator

from dataservice.cli import drain_run
from dataservice.wire.draining import Drain, Drained

LEFT = Drained(done=False, workers=("w0",), packs=3, words="packs still to be fetched: 3")
FEWER = Drained(done=False, workers=("w0",), packs=1, words="packs still to be fetched: 1")
DONE = Drained(done=True, words="worker w0 has left")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCoordinator]:
    monkeypatch.setattr(drain_run, "ASK_EVERY_S", 0.05)
    with FakeCoordinator() as fake:
        yield fake


def test_without_wait_it_is_asked_once(
    fake: FakeCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.drained = [LEFT]
    assert run("drain", fake.endpoint, "--worker", "w0", "--now") == 0
    assert capsys.readouterr().out == "packs still to be fetched: 3\n"
    assert fake.drains == [Drain(worker="w0", now=True)]
    assert run("drain", fake.endpoint, "--node", "n0", "--undo", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "done": False,
        "workers": ["w0"],
        "packs": 3,
        "lanes": 0,
        "words": "packs still to be fetched: 3",
    }
    assert fake.drains[1:] == [Drain(node="n0", undo=True)]


def test_wait_says_each_change_and_ends_when_it_is_done(
    fake: FakeCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.drained = [LEFT, LEFT, FEWER, DONE]
    assert run("drain", fake.endpoint, "--worker", "w0", "--wait") == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [LEFT.words, FEWER.words]
    assert printed.out == "worker w0 has left\n"
    assert fake.drains == [Drain(worker="w0"), *[Drain(worker="w0", again=True)] * 3]


def test_exits_with_1_when_it_is_not_done_in_time(
    fake: FakeCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.drained = [LEFT]
    assert run("drain", fake.endpoint, "--wait", "--timeout-s", 0.2) == 1
    assert "packs still to be fetched: 3" in capsys.readouterr().out


def test_a_coordinator_that_is_away_meanwhile_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain_run, "ASK_EVERY_S", 0.05)
    fake, code = FakeCoordinator(), []
    fake.drained = [LEFT]
    with fake:
        asking = threading.Thread(
            target=lambda: code.append(run("drain", fake.endpoint, "--worker", "w0", "--wait"))
        )
        asking.start()
        while len(fake.drains) < 2:
            asking.join(0.01)
    asking.join(0.3)
    fake.drained = [DONE]
    with fake:
        asking.join(30)
    assert code == [0]
    assert "trying again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--worker", "w", "--node", "n"], "--worker and --node: name one of them"),
        (["--undo"], "--undo: takes a node back; name it with --node"),
        (["--node", ""], "--worker or --node is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert run("drain", "127.0.0.1:1", *options) == 2
    assert words in capsys.readouterr().err
