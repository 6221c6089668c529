"""`serve` in the foreground: how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataservice.actors import launch
from dataservice.errors import ServiceUnavailable


class FakeService:
    endpoint = "127.0.0.1:7070"
    page_url = ""

    def __init__(self) -> None:
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks == 2:
            raise ServiceUnavailable("its node has ended")

    def status(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield
    for name, handler in kept.items():
        signal.signal(name, handler)
    assert signal.set_wakeup_fd(-1) == -1


def serve_with(monkeypatch: pytest.MonkeyPatch, starting: Callable[[Any], None]) -> None:
    @contextmanager
    def running_service(
        _config: object, *, address: str | None, given_up: Callable[[], bool]
    ) -> Iterator[FakeService]:
        starting(given_up)
        yield FakeService()

    monkeypatch.setattr(launch, "running_service", running_service)
    launch.serve_foreground(None)


def test_what_ended_the_service_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceUnavailable, match="its node has ended"):
        serve_with(monkeypatch, lambda _: None)


def test_a_signal_that_another_handler_swallowed_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def starting(given_up: Callable[[], bool]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray does while it starts
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert given_up()
        raise ServiceUnavailable("stopped before the coordinator was up")

    with pytest.raises(SystemExit, match="stopped before the service was up"):
        serve_with(monkeypatch, starting)


def test_a_signal_before_ray_is_up_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(_: Callable[[], bool]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError

    with pytest.raises(SystemExit, match="stopped before the service was up"):
        serve_with(monkeypatch, starting)


def test_a_signal_while_it_serves_ends_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(given_up: Callable[[], bool]) -> None:
        assert not given_up()
        os.kill(os.getpid(), signal.SIGTERM)

    serve_with(monkeypatch, starting)
