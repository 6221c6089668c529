"""Rates over counters that begin anew, by a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataservice.actors import rates
from dataservice.actors.rates import WINDOW_S, Rates
from dataservice.actors.registry import Registry, WorkerSeat
from dataservice.wire.messages import PullWork, RegisterWorker


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.rates = Rates()
        self.registry = Registry(lease_s=2.0, stager_lease_s=10.0)

    def join(self, worker_id: str) -> WorkerSeat:
        return self.registry.seat_worker(
            RegisterWorker(worker_id=worker_id, node="n", endpoint="e:1", decoder="d")
        )

    def tell(self, seat: WorkerSeat, packs: int, images: int = 0, busy_s: float = 0.0) -> None:
        seat.stats = PullWork(
            worker_id=seat.hello.worker_id,
            lease=seat.lease,
            session=1,
            after_sequence=0,
            wait_s=0.0,
            ready_bytes=0,
            ready_packs=0,
            queued_packs=0,
            built_packs=0,
            served_packs=packs,
            served_bytes=0,
            decode_s=0.0,
            read_origin_bytes=0,
            read_staged_bytes=0,
            images=images,
            decoded_bytes=10 * images,
            busy_s=busy_s,
            decode_threads=2,
        )

    def tick(self, done_step: int = 0, generation: int = 1) -> None:
        session: Any = SimpleNamespace(generation=generation, done_step=done_step)
        self.rates.tick(session, self.registry)
        self.now += 1.0

    def figures(self) -> dict[str, float | None]:
        return self.rates.as_json(self.registry)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_rates_are_of_what_was_gained_since_the_window_began(scene: Scene) -> None:
    seat = scene.join("w0")
    for second in range(31):
        scene.tell(seat, packs=5 * second, images=20 * second, busy_s=1.0 * second)
        scene.tick(done_step=second // 2)
    assert scene.figures() == {
        "steps_per_s": 0.5,
        "packs_per_s": 5.0,
        "images_per_s": 20.0,
        "decoded_bytes_per_s": 200,
        "staged_bytes_per_s": 0,
    }
    assert scene.rates.of_worker(seat) == (20.0, 0.5)  # one of two threads


def test_a_stop_is_seen_within_the_window(scene: Scene) -> None:
    seat = scene.join("w0")
    for second in range(10):
        scene.tell(seat, packs=5 * second)
        scene.tick()
    for _ in range(round(WINDOW_S) + 1):
        scene.tick()
    assert scene.figures()["packs_per_s"] == 0.0


def test_counters_that_begin_anew_are_no_gain_and_no_loss(scene: Scene) -> None:
    seat = scene.join("w0")
    scene.tell(seat, packs=1000)
    scene.tick(done_step=700)
    scene.tell(seat, packs=1010)
    scene.tick(done_step=701)
    again = scene.join("w0")  # a process that counts from nought
    scene.tell(again, packs=3)
    scene.tick(done_step=2, generation=2)  # a run that begins earlier
    scene.tell(again, packs=5)
    scene.tick(done_step=3, generation=2)
    figures = scene.figures()
    assert figures["packs_per_s"] == pytest.approx((10 + 2) / 3)
    assert figures["steps_per_s"] == pytest.approx(2 / 3, abs=1e-4)
    assert scene.rates.of_worker(seat) == (0.0, 0.0)


def test_nothing_is_known_before_the_second_tick(scene: Scene) -> None:
    assert set(scene.figures().values()) == {0}
    scene.tick(done_step=50)
    assert set(scene.figures().values()) == {0}
