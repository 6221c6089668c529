from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataservice.actors import supervisor
from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.ray_coordinator import CoordinatorEnded, NodeLost
from dataservice.actors.supervisor import MOST_QUICK_ENDS, Supervisor
from dataservice.errors import ConfigError, DataServiceError, JobHeld, ServiceUnavailable

VIEW = FleetView(target_workers=1, by_hand=False, workers={}, stagers=())


class FakeCoordinator:
    endpoint = "127.0.0.1:7070"

    def __init__(self, _: object) -> None:
        self.starts = 0
        self.is_up = False
        self.on_start: Callable[[int], None] = lambda _: None
        self.on_call: Callable[[int], None] = lambda _: None
        """Get the number of the start, and raise what should happen."""
        self.calls: list[str] = []

    def start(self, given_up: Callable[[], bool]) -> None:
        if given_up():
            raise ServiceUnavailable("stopped before the coordinator was up")
        self.starts += 1
        self.on_start(self.starts)
        self.is_up = True

    def call(self, method: str, *_: Any, timeout_s: float) -> Any:
        self.calls.append(method)
        if method == "fleet":
            self.on_call(self.starts)
        return VIEW

    def changed(self) -> None:
        return None

    def kill(self) -> None:
        self.is_up = False


class FakeFleet:
    def __init__(self, *_: object, own_ray: bool) -> None:
        self.anew = 0
        self.kept = threading.Semaphore(0)

    def keep(self, tell: Callable[[FleetNews], FleetView]) -> None:
        assert tell(FleetNews(ended={}, drain=(), room=1)) is VIEW
        self.kept.release()

    def wait_for_news(self, *_: object) -> None:
        time.sleep(0.001)

    def expect_anew(self) -> None:
        self.anew += 1

    def stop(self) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(supervisor, "RayCoordinator", FakeCoordinator)
    monkeypatch.setattr(supervisor, "RayFleet", FakeFleet)
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0,) * MOST_QUICK_ENDS)
    monkeypatch.setattr(supervisor, "head_answers", lambda: True)
    made = Supervisor(None, own_ray=False)
    yield made
    made.stop()
    assert "supervisor" not in [thread.name for thread in threading.enumerate()]


def end(text: str) -> None:
    raise CoordinatorEnded(text)


def wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_coordinator_that_ends_is_started_again(service: Supervisor) -> None:
    fake: Any = service.coordinator
    fake.on_call = lambda start: end("killed") if start < 3 else None
    assert service.start() == fake.endpoint
    wait(lambda: service.restarts == 2)
    assert service._fleet.kept.acquire(timeout=5)
    service.check()
    assert service._fleet.anew == 2


def test_it_gives_up_after_quick_ends(service: Supervisor) -> None:
    fake: Any = service.coordinator
    fake.on_call = lambda start: end(f"end {start}")
    service.start()
    wait(lambda: service.failure is not None)
    with pytest.raises(DataServiceError, match="started again 5 times and never lived for 60 s"):
        service.check()
    assert f"the last time: end {MOST_QUICK_ENDS + 1}." in str(service.failure)
    assert "serve again with the same state_dir" in str(service.failure)


def test_ends_after_a_long_life_are_not_counted(
    service: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "QUICK_S", 0.0)
    fake: Any = service.coordinator
    fake.on_call = lambda start: end("killed") if start < 20 else None
    service.start()
    wait(lambda: service.restarts == 19)
    service.check()


def test_a_start_that_fails_is_tried_again(service: Supervisor) -> None:
    def refuse(start: int) -> None:
        if start in (2, 3):
            raise ConfigError("the port is in use")

    fake: Any = service.coordinator
    fake.on_start, fake.on_call = refuse, lambda start: end("killed") if start == 1 else None
    service.start()
    wait(lambda: service.restarts == 1)
    assert fake.starts == 4


def test_what_the_first_start_raises_is_raised(service: Supervisor) -> None:
    fake: Any = service.coordinator

    def refuse(_: int) -> None:
        raise JobHeld("held by another")

    fake.on_start = refuse
    with pytest.raises(JobHeld):
        service.start()


def test_a_superseded_coordinator_is_not_started_again(service: Supervisor) -> None:
    def superseded(_: int) -> None:
        raise JobHeld("epoch 2 holds it")

    fake: Any = service.coordinator
    fake.on_call = superseded
    service.start()
    wait(lambda: service.failure is not None)
    with pytest.raises(JobHeld):
        service.check()
    assert fake.starts == 1


def test_the_loss_of_its_node_ends_the_service(service: Supervisor) -> None:
    def lost(start: int) -> None:
        if start == 2:
            raise NodeLost("the Ray node of this machine has ended")

    fake: Any = service.coordinator
    fake.on_start, fake.on_call = lost, lambda _: end("killed")
    service.start()
    wait(lambda: service.failure is not None)
    with pytest.raises(NodeLost):
        service.check()
    assert fake.starts == 2


def test_a_stop_is_heard_while_it_starts(service: Supervisor) -> None:
    with pytest.raises(ServiceUnavailable, match="stopped before the coordinator was up"):
        service.start(lambda: True)


def test_a_coordinator_that_does_not_answer_is_not_asked_twice(service: Supervisor) -> None:
    fake: Any = service.coordinator
    service.start()
    asked = []

    def silent(method: str, *_: Any, timeout_s: float) -> Any:
        asked.append(method)
        end("it has not answered")

    assert service._fleet.kept.acquire(timeout=5)
    service._stopping.set()
    service._thread.join(5)
    fake.call = silent
    service.stop()
    assert asked == ["wind_down"]


def test_an_error_of_the_fleet_is_no_end(
    service: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KEEP_S", 0.001)
    failures = iter([RuntimeError("once"), RuntimeError("twice")])

    def fail(_: int) -> None:
        for failure in failures:
            raise failure

    fake: Any = service.coordinator
    fake.on_call = fail
    service.start()
    assert service._fleet.kept.acquire(timeout=5)
    service.check()
    assert fake.starts == 1


def test_the_loss_of_rays_head_is_told(
    service: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "HEAD_S", 0.05)
    fake: Any = service.coordinator
    service.start()
    monkeypatch.setattr(supervisor, "head_answers", lambda: False)
    for _ in range(3):
        service.check()
        time.sleep(0.05)
    assert [record for record in caplog.messages if "does not answer" in record]
    fake.on_start = lambda _: time.sleep(0.5)
    fake.is_up = False
    with pytest.raises(ServiceUnavailable, match="serve again with the same state_dir and port"):
        service.check()
