"""What the prefetch thread does beside fetching: copies to the device ahead of the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from trainer_client import MicroBatch, PackStream, ParallelLayout, prefetch
from trainer_client.device import Copy, DeviceCopier
from trainer_client.prefetch import Prefetcher
from trainer_client.testing import FakeService, synthetic_packs

PACKS = synthetic_packs(10, seed=3)
BATCH_BYTES = 100


class CountingCopier(DeviceCopier):
    """Every batch takes BATCH_BYTES on a device that is not there."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.started: list[int] = []
        self.threads: set[str] = set()
        self.fails_at = -1

    def device_bytes(self, batch: MicroBatch) -> int:
        return BATCH_BYTES

    def start(self, batch: MicroBatch) -> Copy:
        if batch.step == self.fails_at:
            raise MemoryError("the device is full")
        self.started.append(batch.step)
        self.threads.add(threading.current_thread().name)
        return super().start(batch)

    def finish(self, copy: Copy) -> MicroBatch:
        assert copy.batch.step in self.started
        return super().finish(copy)


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(PACKS, ahead_steps=20) as service:
        yield service


def stream_of(service: FakeService, *, device_bytes: int) -> tuple[PackStream, CountingCopier]:
    stream = PackStream(
        service.endpoint,
        job="j",
        layout=ParallelLayout(),
        micro_steps=1,
        prefetch_packs=6,
        device_bytes=device_bytes,
        timeout_s=30,
    )
    copier = CountingCopier()
    stream._copier = copier
    return stream, copier


def settled(stream: PackStream, held_packs: int) -> None:
    """Once so many packs are received and waiting."""
    deadline = time.monotonic() + 20

    while stream.stats().received_packs != held_packs:
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    time.sleep(0.05)


def test_copies_start_ahead_within_the_device_bound(service: FakeService) -> None:
    stream, copier = stream_of(service, device_bytes=2 * BATCH_BYTES + 50)
    with stream:
        stream.open()
        settled(stream, 6)
        assert copier.started == [0, 1]
        assert all(name.startswith("pack-stream") for name in copier.threads)
        assert stream.stats().device_bytes == 2 * BATCH_BYTES
        for step in range(3):
            assert next(stream).step == step
            assert copier.started == list(range(step + 3))  # before the trainer computes
        assert [batch.step for batch in stream] == list(range(3, 10))
        assert copier.started == list(range(10))
        assert stream.stats().peak_device_bytes == 2 * BATCH_BYTES
        assert stream.stats().device_bytes == 0


def test_the_next_batch_is_copied_whatever_its_size(service: FakeService) -> None:
    stream, copier = stream_of(service, device_bytes=1)
    with stream:
        stream.open()
        settled(stream, 6)
        assert copier.started == [0]
        next(stream)
        assert copier.started == [0, 1]
        assert len(list(stream)) == 9


def test_a_copy_that_fails_in_the_trainers_thread_skips_no_batch(service: FakeService) -> None:
    stream, copier = stream_of(service, device_bytes=1)
    with stream:
        copier.fails_at = 3
        stream.open()
        settled(stream, 6)
        assert [next(stream).step for _ in range(2)] == [0, 1]
        state = stream.state_dict()
        for _ in range(2):
            with pytest.raises(MemoryError, match="the device is full"):
                next(stream)
        assert stream.state_dict() == state
        assert state["cursor"]["step"] == 2


def test_a_rank_that_knows_its_step_asks_for_the_next_when_it_is_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    plain = Prefetcher._ask_for_steps

    def ask(prefetcher: Prefetcher) -> None:
        asked.append((len(prefetcher._known), prefetcher._micro_step))
        plain(prefetcher)

    monkeypatch.setattr(prefetch, "ask_at", lambda rank, micro_steps: 3)
    monkeypatch.setattr(Prefetcher, "_ask_for_steps", ask)
    with FakeService(synthetic_packs(32, seed=3)) as service:
        with PackStream(
            service.endpoint,
            job="j",
            layout=ParallelLayout(),
            micro_steps=4,
            prefetch_packs=1,
            timeout_s=30,
        ) as stream:
            assert len(list(stream)) == 32
    early = [micro_step for known, micro_step in asked if known]
    assert early and set(early) == {3}
