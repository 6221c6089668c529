"""Peers of a rank: one fetch a host, the same packs, and what happens when one of them ends.

Run as a script it is one process of a job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dataservice.errors import ConfigError, DataServiceError, DeadlineExceeded
from dataservice.wire.messages import SessionOpened, StepCells
from trainer_client import PackStream, ParallelLayout, agreement, relay, session
from trainer_client.agreement import check_first_packs
from trainer_client.relay import relay_name
from trainer_client.testing import FAKE_INFO, FakeService, read_all, synthetic_packs

PACKS = synthetic_packs(24, seed=3)
FOUR: dict[str, Any] = {"dp": 2, "tp": 2}


def stream_of(endpoint: str, layout: ParallelLayout, **changes: Any) -> PackStream:
    settings = {"job": "test", "micro_steps": 2, "digests": True, "timeout_s": 60}
    return PackStream(endpoint, layout=layout, **(settings | changes))


def log_of(batch: Any) -> list[Any]:
    return [batch.step, batch.micro_step, batch.meta["pack_numbers"], batch.meta["digests"]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to fetch twice."""
    monkeypatch.setattr(relay, "WAIT_S", 60.0)


# ---- processes ----------------------------------------------------------------------------------


def process_main(settings: dict[str, Any], folder: Path) -> None:
    """Reads a stream to its end, or up to a batch, where it waits to be killed."""
    relay.WAIT_S = session.BUILD_WAIT_S = 60.0  # a busy machine is no reason to fetch twice
    layout = ParallelLayout(**settings["layout"])
    store = None
    if settings["run_id"] is None:
        store = dist.FileStore(f"{folder}/rendezvous", layout.world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=60),
        )
    got: list[Any] = []
    with stream_of(settings["endpoint"], layout, run_id=settings["run_id"]) as stream:
        for batch in stream:
            got.append(log_of(batch))
            if len(got) == settings.get("stop_at"):
                (folder / f"{layout.rank}.waits").touch()
                time.sleep(600)
            (folder / f"{layout.rank}.began").touch()
            while (folder / f"{layout.rank}.hold").exists():
                time.sleep(0.01)
        relayed = stream.stats().relayed_packs
        run_id = stream._request.run_id
    (folder / f"{layout.rank}.json").write_text(
        json.dumps({"got": got, "relayed": relayed, "run_id": run_id})
    )
    if store is not None:
        dist.destroy_process_group()


def names_of(run_id: str, dp_rank: int) -> list[str]:
    """Abstract sockets of a relay that exist on this host."""
    name = relay_name(json.dumps(("test", FAKE_INFO.plan_digest, "1", run_id)), dp_rank, 0)
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


@contextmanager
def job(folder: Path, settings: Sequence[dict[str, Any]]) -> Iterator[list[subprocess.Popen[Any]]]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    processes: list[subprocess.Popen[Any]] = []
    try:
        for one in settings:
            arguments = [sys.executable, __file__, json.dumps(one), str(folder)]
            processes.append(subprocess.Popen(arguments, env=environment, cwd=root))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def results(folder: Path, ranks: Sequence[int]) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_four_processes_fetch_each_pack_once(tmp_path: Path) -> None:
    with FakeService(PACKS) as service:
        settings = [
            {"layout": {"rank": r, **FOUR}, "run_id": None, "endpoint": service.endpoint}
            for r in range(4)
        ]
        with job(tmp_path, settings) as processes:
            assert [process.wait(timeout=100) for process in processes] == [0] * 4
        fetched = Counter(pack_id for _, pack_id in service.requests)
    done = results(tmp_path, range(4))
    layouts = [ParallelLayout(rank=rank, **FOUR) for rank in range(4)]
    by_rank: dict[int, list[Any]] = {}
    for layout, one in zip(layouts, done, strict=True):
        assert one["got"] == by_rank.setdefault(layout.dp_rank, one["got"])
        assert one["relayed"] == (0 if layout.peer == 0 else len(PACKS) // 2)
        assert not names_of(one["run_id"], layout.dp_rank)
    numbers = [{n for _, _, ns, _ in by_rank[rank] for n in ns} for rank in range(2)]
    assert not numbers[0] & numbers[1] and len(numbers[0] | numbers[1]) == len(PACKS)
    assert set(fetched.values()) == {1} and len(fetched) == len(PACKS)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_peer_leaves_nothing_and_the_other_goes_on(tmp_path: Path, killed: int) -> None:
    other, run_id = 1 - killed, f"run {tmp_path}"
    with FakeService(PACKS, ahead_steps=100) as service:
        settings = [
            {"layout": {"rank": r, "tp": 2}, "run_id": run_id, "endpoint": service.endpoint}
            for r in range(2)
        ]
        settings[killed]["stop_at"] = 4
        (tmp_path / f"{other}.hold").touch()
        with job(tmp_path, settings) as processes:
            wait_until((tmp_path / f"{killed}.waits").exists)
            wait_until((tmp_path / f"{other}.began").exists)
            assert names_of(run_id, 0)
            os.kill(processes[killed].pid, signal.SIGKILL)
            processes[killed].wait(20)
            if killed == 0:
                wait_until(lambda: not names_of(run_id, 0))
            (tmp_path / f"{other}.hold").unlink()
            assert processes[other].wait(timeout=60) == 0
        assert not names_of(run_id, 0)
        with stream_of(service.endpoint, ParallelLayout(), run_id="alone") as stream:
            expected = [log_of(batch) for batch in stream]
    (survivor,) = results(tmp_path, [other])
    assert survivor["got"] == expected
    if other == 1:
        assert 0 < survivor["relayed"] < len(PACKS)


# ---- threads: bounds and hosts ------------------------------------------------------------------


def peers_of(service: FakeService, count: int, **changes: Any) -> list[PackStream]:
    return [
        stream_of(service.endpoint, ParallelLayout(rank=rank, tp=count), **changes)
        for rank in range(count)
    ]


def close(streams: Sequence[PackStream]) -> None:
    for stream in streams:
        stream.close()


def test_without_the_local_path_each_peer_fetches(tmp_path: Path) -> None:
    with FakeService(PACKS) as service:
        streams = peers_of(service, 2, run_id=str(tmp_path), local=False)
        read_all(streams)
        assert [stream.stats().relayed_packs for stream in streams] == [0, 0]
        assert len(service.requests) == 2 * len(PACKS)
        close(streams)


def test_peers_of_two_hosts_fetch_once_on_each(tmp_path: Path) -> None:
    with FakeService(PACKS) as service:
        streams = [
            stream_of(
                service.endpoint,
                ParallelLayout(rank=rank, tp=4),
                run_id=str(tmp_path),
                host=f"host{rank // 2}",
            )
            for rank in range(4)
        ]
        batches = read_all(streams)
        relayed = [stream.stats().relayed_packs for stream in streams]
        close(streams)
        assert relayed == [0, len(PACKS), 0, len(PACKS)]
        assert len(service.requests) == 2 * len(PACKS)
    logs = [[log_of(batch) for batch in one] for one in batches]
    assert logs.count(logs[0]) == 4


def test_another_job_with_the_same_run_id_hands_on_nothing(tmp_path: Path) -> None:
    """Both have packs of the same ids."""
    others = synthetic_packs(len(PACKS), seed=9)
    info = replace(FAKE_INFO, plan_digest="other")
    with FakeService(PACKS) as one, FakeService(others, info=info) as other:
        streams = [
            *peers_of(one, 2, run_id=str(tmp_path)),
            *peers_of(other, 2, run_id=str(tmp_path), job="other"),
        ]
        batches = read_all(streams)
        relayed = [stream.stats().relayed_packs for stream in streams]
        close(streams)
    logs = [[log_of(batch) for batch in one] for one in batches]
    assert logs[0] == logs[1] and logs[2] == logs[3] and logs[0] != logs[2]
    assert relayed == [0, len(PACKS), 0, len(PACKS)]


def test_a_wrong_pack_of_a_peer_is_fetched_from_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = relay.Leader.put

    def put_damaged(self: relay.Leader, pack_id: str, pack: Any) -> None:
        arrays, meta = pack
        put(self, pack_id, (arrays, meta | {"num_docs": -1}))

    monkeypatch.setattr(relay.Leader, "put", put_damaged)
    with FakeService(PACKS) as service:
        streams = peers_of(service, 2, run_id=str(tmp_path))
        batches = read_all(streams)
        assert [stream.stats().relayed_packs for stream in streams] == [0, 0]
        close(streams)
        assert service.failed == []
    logs = [[log_of(batch) for batch in one] for one in batches]
    assert logs[0] == logs[1]


def test_a_peer_that_stalls_slows_nobody_and_grows_no_memory(tmp_path: Path) -> None:
    with FakeService(PACKS, ahead_steps=100) as service:
        leading, stalled = peers_of(service, 2, run_id=str(tmp_path), prefetch_packs=2)
        opening = threading.Thread(target=stalled.open)
        opening.start()
        leading.open()
        opening.join(30)
        assert leading._session is not None
        leader: Any = leading._session._relay
        leader.shelf._max_bytes = 4 << 20
        expected = []
        for batch in leading:
            expected.append(log_of(batch))
            assert leader.shelf.size_bytes <= 4 << 20
        assert [log_of(batch) for batch in stalled] == expected
        assert stalled.stats().relayed_packs < len(PACKS)
        close([leading, stalled])


def test_a_stream_whose_process_is_not_to_read_is_refused() -> None:
    layout = ParallelLayout(rank=1, tp=2, trainer_shares=("tp",))
    with pytest.raises(ConfigError, match="rank 1 is not to read"):
        stream_of("127.0.0.1:1", layout, run_id="r")


def test_a_peer_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SessionOpened(
        ready=False, session=0, missing_ranks=(0,), waiting_for="of rank 0 peer 1"
    )
    with (
        FakeService(PACKS) as service,
        stream_of(service.endpoint, ParallelLayout(tp=2), run_id="lonely", timeout_s=0.2) as stream,
        pytest.raises(DeadlineExceeded, match=r'with run id "lonely": of rank 0 peer 1$'),
    ):
        monkeypatch.setattr("trainer_client.session.Session._call", lambda *_: answer)
        stream.open()


# ---- what is checked at the start ---------------------------------------------------------------


def test_documents_must_be_aligned_as_the_layout_needs(tmp_path: Path) -> None:
    layout = ParallelLayout(rank=0, cp=2, trainer_shares=("cp",))
    with FakeService(PACKS, info=replace(FAKE_INFO, align=2)) as service:
        with (
            stream_of(service.endpoint, layout, run_id=f"{tmp_path}-2") as stream,
            pytest.raises(ConfigError, match=r"plan\.align = 2 .*cp = 2.*set `plan\.align: 4`"),
        ):
            stream.open()
        service.info = replace(FAKE_INFO, align=8)
        with stream_of(service.endpoint, layout, run_id=f"{tmp_path}-8") as stream:
            assert stream.open().align == 8


@cache
def some_cells() -> StepCells:
    with FakeService(PACKS) as service, stream_of(service.endpoint, ParallelLayout()) as stream:
        stream.open()
        return service.step(0, 0)


def cells(numbers: Sequence[int]) -> StepCells:
    """Of a step with these packs."""
    share = some_cells()
    place = share.cells[0][0]
    return replace(share, cells=(tuple(replace(place, number=number) for number in numbers),))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def check_all(
    packs: Mapping[int, Sequence[int]],
    *,
    sessions: dict[int, int] | None = None,
    timeout_s: float = 20.0,
    **sizes: Any,
) -> list[DataServiceError | None]:
    """What each rank of the job is told that was given these packs; ranks without do not come."""
    found: dict[int, DataServiceError | None] = {}

    def check(rank: int, share: StepCells) -> None:
        opened = SessionOpened(ready=True, session=(sessions or {}).get(rank, 1))
        try:
            layout = ParallelLayout(rank=rank, **sizes)
            check_first_packs(layout, "run", opened, share, timeout_s=timeout_s)
            found[rank] = None
        except DataServiceError as error:
            found[rank] = error

    shares = {rank: cells(numbers) for rank, numbers in packs.items()}
    threads = [threading.Thread(target=check, args=both) for both in shares.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in packs]


def test_ranks_that_got_their_own_packs_go_on(store: Any) -> None:
    good = {0: [4, 5], 1: [4, 5], 2: [7, -1], 3: [7, -1]}
    for _ in range(2):  # a second stream of the run
        assert check_all(good, **FOUR) == [None] * 4
    padded = {0: [-1], 1: [-1], 2: [-1], 3: [-1]}
    assert check_all(padded, **FOUR) == [None] * 4


@pytest.mark.parametrize(
    ("packs", "words"),
    [
        ({0: [4], 1: [4], 2: [7], 3: [4]}, r"ranks 2 and 3 share dp_rank 1 .*\[7\] and \[4\]"),
        ({0: [4], 1: [4], 2: [4], 3: [4]}, "ranks 0 and 2 have dp_rank 0 and 1 .* number 4"),
    ],
)
def test_every_rank_is_told_who_reads_what_it_should_not(
    store: Any, packs: dict[int, list[int]], words: str
) -> None:
    errors = check_all(packs, **FOUR)
    for error in errors:
        with pytest.raises(ConfigError, match=f"{words}.*from_env, from_mesh and from_megatron"):
            raise error or AssertionError("nothing was found")


def test_ranks_of_two_sessions_are_told(store: Any) -> None:
    errors = check_all({0: [4], 1: [5]}, sessions={1: 2}, dp=2)
    assert all("rank 1 reads session 2, rank 0 session 1" in str(error) for error in errors)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named_in_time(store: Any, absent: int) -> None:
    packs = {rank: [rank] for rank in range(3) if rank != absent}
    errors = check_all(packs, timeout_s=0.3, dp=3)
    assert all(isinstance(error, DeadlineExceeded) for error in errors)
    named = "for rank 0 to compare" if absent == 0 else "rank 1 did not come"
    assert all(named in str(error) for error in errors)


def test_only_those_that_read_are_waited_for(store: Any) -> None:
    packs = {0: [4], 2: [7]}
    assert check_all(packs, **FOUR, trainer_shares=("tp",)) == [None, None]
    assert agreement.MOST_NUMBERS >= 2


if __name__ == "__main__":
    process_main(json.loads(sys.argv[1]), Path(sys.argv[2]))
