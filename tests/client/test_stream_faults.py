"""PackStream when something breaks: dead workers, wrong bytes, newer runs, forks, closing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dataservice.errors import (
    ConfigError,
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    SessionFenced,
    WireError,
)
from dataservice.wire.messages import StreamPack
from trainer_client import PackStream, ParallelLayout
from trainer_client.testing import (
    FakeService,
    assert_same_batches,
    read_all,
    synthetic_packs,
)

PACKS = synthetic_packs(12, seed=4)


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(PACKS, num_workers=2, frame_bytes=256) as service:
        yield service


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("pack-stream")]
    assert left == []


def stream_of(
    service: FakeService, *, dp_rank: int = 0, dp_size: int = 1, **changes: Any
) -> PackStream:
    settings = {
        "job": "test",
        "layout": ParallelLayout.data_parallel(dp_rank, dp_size),
        "micro_steps": 2,
        "digests": True,
        "timeout_s": 30,
    }
    return PackStream(service.endpoint, **(settings | changes))


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# ---- workers and bytes --------------------------------------------------------------------------


class WrongRelay:
    """A peer that hands on some other pack."""

    def take(self, request: StreamPack, **_: Any) -> Any:
        return {}, {"pack_id": "another"}

    def put(self, pack_id: str, pack: Any) -> None: ...

    def close(self) -> None: ...


def test_a_damaged_pack_of_a_peer_is_fetched_and_no_worker_blamed(service: FakeService) -> None:
    with stream_of(service) as stream:
        stream._opened()._relay = WrongRelay()
        assert stream.get(0, 0).micro_step == 0
        assert (stream.stats().relayed_packs, stream.stats().retries) == (0, 0)
    assert service.failed == []


def test_a_worker_dies_in_the_middle_of_a_stream(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    service.requests.clear()
    first = service.workers[0]
    with stream_of(service, prefetch_packs=2) as stream:
        service.frame_delay_s = 0.05
        got = [next(stream) for _ in range(3)]
        wait_until(lambda: len(service.requests) == 5)
        time.sleep(0.1)
        service.kill_worker(first)
        service.frame_delay_s = 0.0
        got += list(stream)
        assert stream.stats().retries >= 1
    assert_same_batches(got, whole)
    assert first in service.failed


def test_all_workers_die_and_a_new_one_comes(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    with stream_of(service, prefetch_packs=1) as stream:
        got = [next(stream) for _ in range(4)]
        for endpoint in service.workers:
            service.kill_worker(endpoint)
        threading.Timer(0.3, service.add_worker).start()
        got += list(stream)
    assert_same_batches(got, whole)


def test_a_flipped_byte_is_fetched_again(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    service.requests.clear()
    service.corrupt("0.0.3")
    service.corrupt("0.0.7")
    with stream_of(service) as stream:
        assert_same_batches(list(stream), whole)
        assert stream.stats().retries == 2
    assert [pack for _, pack in service.requests].count("0.0.3") == 2


def test_bytes_that_stay_wrong_are_an_error_that_stays(service: FakeService) -> None:
    service.corrupt("0.0.3", times=100)
    with stream_of(service, prefetch_packs=1) as stream:
        batches = [next(stream) for _ in range(3)]
        state = stream.state_dict()
        for _ in range(2):
            with pytest.raises(WireError):
                next(stream)
        assert stream.state_dict() == state
    assert [batch.meta["pack_numbers"] for batch in batches] == [[0], [1], [2]]


def test_a_pack_of_another_name_is_not_taken(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = service.frames
    monkeypatch.setattr(service, "frames", lambda pack_id: frames("0.0.0"))
    with stream_of(service) as stream, pytest.raises(WireError, match=r"0\.0\.1"):
        list(stream)


# ---- coordinator --------------------------------------------------------------------------------


def test_a_newer_run_fences_the_older(service: FakeService) -> None:
    with stream_of(service, prefetch_packs=1) as old:
        next(old)
        with stream_of(service) as new:
            assert next(new).step == 0
            for _ in range(2):
                with pytest.raises(SessionFenced, match="replaced"):
                    list(old)
            assert len(list(new)) == 11


def test_a_newer_run_does_not_replace_the_end_of_the_data(service: FakeService) -> None:
    """All batches are here: what the last report of progress is answered says nothing of them."""
    with stream_of(service, prefetch_packs=12) as old:
        next(old)
        prefetcher = old._prefetcher
        assert prefetcher is not None
        wait_until(lambda: prefetcher._ended)
        with stream_of(service) as new:
            assert next(new).step == 0
            for _ in range(11):
                next(old)
            wait_until(lambda: not prefetcher._thread.is_alive())  # it has reported
            assert next(old, None) is None


def test_missing_ranks_are_named(service: FakeService) -> None:
    missing = r"rank 1 waited .* ranks 0, 2 have not come with run id \"lonely\""
    with (
        stream_of(service, dp_rank=1, dp_size=3, run_id="lonely", timeout_s=0.3) as stream,
        pytest.raises(DeadlineExceeded, match=missing),
    ):
        next(stream)


def test_nobody_answers() -> None:
    with PackStream(
        "127.0.0.1:1",
        job="j",
        layout=ParallelLayout.data_parallel(0, 1),
        micro_steps=1,
        timeout_s=0.3,
    ) as stream:
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1"):
                next(stream)


def test_a_late_step_names_who_holds_it_back(service: FakeService) -> None:
    service.hold_from = 1
    with stream_of(service, timeout_s=0.4) as stream:
        assert [next(stream).micro_step for _ in range(2)] == [0, 1]
        with pytest.raises(DeadlineExceeded, match="step 1 is held back: the test"):
            next(stream)
        with pytest.raises(DeadlineExceeded, match="step 1 is held back: the test"):
            stream.get(1, 0)
        service.hold_from = None
        assert next(stream).step == 1


def test_the_service_goes_away(service: FakeService) -> None:
    with stream_of(service, prefetch_packs=2, timeout_s=1.0) as stream:
        got = [next(stream)]
        service._wait(service._server.stop(0))
        for endpoint in service.workers:
            service.kill_worker(endpoint)
        with pytest.raises(ServiceUnavailable, match="cursor is intact"):
            for batch in stream:
                got.append(batch)
        state = stream.state_dict()
        assert state["cursor"]["step"] * 2 + state["micro_step"] == len(got)


# ---- closing ------------------------------------------------------------------------------------


def test_close_is_idempotent_and_final(service: FakeService) -> None:
    stream = stream_of(service)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(DataServiceError, match="closed"):
        next(stream)
    stream_of(service).close()


@pytest.mark.parametrize("where", ["a step", "the ranks", "a pack"])
def test_close_ends_a_wait(service: FakeService, where: str) -> None:
    changes: dict[str, Any] = {}
    if where == "a step":
        service.hold_from = 0
    elif where == "the ranks":
        changes = {"dp_size": 2, "run_id": "half"}
    else:
        service.frame_delay_s = 30.0
    stream = stream_of(service, timeout_s=60, **changes)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            next(stream)
        except DataServiceError as error:
            errors.append(error)

    trainer = threading.Thread(target=consume)
    trainer.start()
    wait_until(lambda: stream._session is not None)
    time.sleep(0.2)
    stream.close()
    trainer.join(10)
    assert not trainer.is_alive()
    assert "closed" in str(errors[0])


def test_a_forgotten_stream_is_closed(service: FakeService) -> None:
    stream = stream_of(service)
    next(stream)
    del stream
    gc.collect()
    assert service.closed == {0}


def test_closing_without_a_coordinator(service: FakeService) -> None:
    stream = stream_of(service)
    next(stream)
    service._wait(service._server.stop(0))
    stream.close()


def test_threads_that_come_first_open_it_once(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    for _ in range(5):
        stream, results = stream_of(service), list[Any]()
        at_once = threading.Barrier(5)

        def read(
            number: int,
            stream: PackStream = stream,
            results: list[Any] = results,
            at_once: threading.Barrier = at_once,
        ) -> None:
            at_once.wait(20)
            try:
                results.append(stream.get(number, 0) if number < 4 else list(stream))
            except DataServiceError as error:
                results.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        stream.close()
        (batches,) = [one for one in results if isinstance(one, list)]
        assert_same_batches(batches, whole)
        got = {one.step: one for one in results if not isinstance(one, list)}
        assert_same_batches([got[step] for step in range(4)], whole[:8:2])


def test_close_while_it_opens_leaves_nothing(service: FakeService) -> None:
    for number in range(12):
        stream = stream_of(service)
        closer = threading.Timer(0.002 * number, stream.close)
        closer.start()
        with suppress(DataServiceError):
            list(stream)
        closer.join(30)
        with pytest.raises(DataServiceError, match="closed"):
            next(stream)
        assert stream._prefetcher is None or not stream._prefetcher._thread.is_alive()


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_a_fork_is_refused(service: FakeService) -> None:
    with stream_of(service) as stream:
        next(stream)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(stream)
                text = "no error"
            except DataServiceError as error:
                text = str(error)
            stream.close()
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        assert "after a fork" in text
        assert "num_workers=0" in text
        assert len(list(stream)) == 11


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_without_its_parents_locks(service: FakeService) -> None:
    with stream_of(service, prefetch_packs=1) as stream:
        next(stream)
        with stream._buffers._lock:
            child = os.fork()
            if child == 0:
                stream.close()
                os._exit(0)
        try:
            wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        assert len(list(stream)) == 11


def test_data_loader_workers_are_refused(service: FakeService, monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer_client.stream.get_worker_info", lambda: object())
    with stream_of(service) as stream, pytest.raises(ConfigError, match="num_workers=0"):
        list(DataLoader(stream, batch_size=None))


def test_two_ranks_with_a_dying_worker_miss_and_repeat_nothing(service: FakeService) -> None:
    streams = [
        stream_of(service, run_id="pair", dp_rank=rank, dp_size=2, prefetch_packs=2)
        for rank in range(2)
    ]
    service.frame_delay_s = 0.01
    threading.Timer(0.2, service.kill_worker, [service.workers[1]]).start()
    ranks = read_all(streams)
    for stream in streams:
        stream.close()
    numbers = [n for batches in ranks for batch in batches for n in batch.meta["pack_numbers"]]
    assert sorted(numbers) == list(range(12))
