from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataservice.actors import launch
from dataservice.actors.ray_coordinator import CoordinatorEnded
from dataservice.errors import DataServiceError, ServiceUnavailable


class FakeService:
    endpoint = "127.0.0.1:7070"

    def __init__(self, *errors: DataServiceError) -> None:
        self._errors = iter(errors)

    def status(self) -> dict[str, Any]:
        raise next(self._errors, AssertionError("it was asked once more"))


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def test_serving_outlives_the_coordinator_and_ends_with_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def running(*_: object, **__: object) -> Iterator[FakeService]:
        yield FakeService(CoordinatorEnded("killed"), ServiceUnavailable("Ray's head is lost"))

    monkeypatch.setattr(launch, "running_service", running)
    with pytest.raises(ServiceUnavailable, match="Ray's head is lost"):
        launch.serve_foreground(None)
