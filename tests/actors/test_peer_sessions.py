"""Sessions of ranks that several processes read for."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_settings, write_config

from dataservice.config import Config, load_config
from dataservice.errors import ConfigError
from dataservice.wire.messages import Progress


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(str(write_config(tmp_path, demo_settings(tmp_path))))


async def opened(bench: Bench, hosts: str = "aab") -> int:
    """The session of two ranks with a peer on each of these hosts."""
    await bench.worker("w0")
    for rank in range(2):
        for peer, host in enumerate(hosts):
            answer = await bench.open(
                "run", rank, 2, peer=peer, peers=len(hosts), host=host, pid=peer
            )
    session: int = answer.session
    return session


def test_a_session_opens_when_every_peer_of_every_rank_has_come(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        first = await bench.open("run", 0, 2, peer=1, peers=3)
        assert first.missing_ranks == (0, 1)
        assert first.waiting_for == "of rank 0 peers 0, 2; of rank 1 peers 0, 1, 2"
        for rank, peer in ((0, 0), (0, 2), (1, 2), (1, 0)):
            answer = await bench.open("run", rank, 2, peer=peer, peers=3)
            assert not answer.ready
        assert answer.missing_ranks == (1,)
        assert answer.waiting_for == "of rank 1 peer 1"
        assert (await bench.open("run", 1, 2, peer=1, peers=3)).ready
        assert (await bench.open("run", 0, 2, peer=0, peers=3)).ready

    on_bench(config, tmp_path / "state", check)


def test_peers_learn_who_is_on_their_host(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session = await opened(bench)
        for peer, host, here in ((0, "a", (0, 1)), (1, "a", (0, 1)), (2, "b", (2,))):
            answer = await bench.open("run", 1, 2, peer=peer, peers=3, host=host)
            assert answer.host_peers == here
        (cells,) = (await bench.steps(session, 0, done=0)).steps
        work = await bench.pull("w0", session)
        assert {assignment.takers for assignment in work.assignments} == {2}
        assert cells.cells[0]

    on_bench(config, tmp_path / "state", check)


def test_a_rank_is_as_far_as_its_slowest_peer(config: Config, tmp_path: Path) -> None:
    config = dataclasses.replace(config, serving=dataclasses.replace(config.serving, lease_s=30.0))

    async def check(bench: Bench) -> None:
        session = await opened(bench)
        for peer, done in ((0, 2), (1, 1), (2, 2)):
            await bench.steps(session, done, done=done, peer=peer)
        await bench.steps(session, 2, done=2, rank=1, peer=0)
        status = (await bench.status())["session"]
        assert status["done"] == [[1, 0], [0, 0]]
        assert status["done_step"] == 0
        beyond = await bench.steps(session, config.serving.plan_ahead_steps, done=2, rank=1)
        assert "peer 1 of rank 1 is at step 0" in beyond.blocked_by
        for peer in (1, 2):
            await bench.steps(session, 1, done=1, rank=1, peer=peer)
        assert (await bench.status())["session"]["done_step"] == 1

    on_bench(config, tmp_path / "state", check)


def test_waits_of_peers_are_not_added_up(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session = await opened(bench)
        for peer in range(3):
            await bench.coordinator.report_progress(
                Progress(
                    session=session,
                    dp_rank=0,
                    peer=peer,
                    done_step=0,
                    done_micro_step=0,
                    waited_s=2.0 + peer,
                    closing=peer < 2,
                )
            )
        status = (await bench.status())["session"]
        assert status["waited_s"] == [4.0, 0.0]
        assert status["closed"] == [False, False]

    on_bench(config, tmp_path / "state", check)


def test_a_restarted_coordinator_knows_the_peers(config: Config, tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await opened(bench)

    async def after(bench: Bench) -> None:
        await bench.worker("w0")
        answer = await bench.open("run", 0, 2, peer=0, peers=3, host="a")
        assert answer.host_peers == (0, 1)
        with pytest.raises(ConfigError, match="other sizes"):
            await bench.open("run", 0, 2, peer=0, peers=2, host="a")

    on_bench(config, tmp_path / "state", before)
    on_bench(config, tmp_path / "state", after)


def test_two_processes_at_one_place_are_refused_once_both_are_known_to_live(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        for pid in (11, 12):  # the second may be the first, started again
            assert not (await bench.open("run", 0, 2, peer=0, peers=2, pid=pid)).ready
        with pytest.raises(
            ConfigError, match=r"11 on h and 12 on h both .* peer 0 of rank 0: give"
        ):
            await bench.open("run", 0, 2, peer=0, peers=2, pid=11)
        with pytest.raises(ConfigError, match="both"):
            await bench.open("run", 1, 2, peer=1, peers=2, pid=14)

    on_bench(config, tmp_path / "state", check)


def test_processes_that_share_a_rank_unsaid_are_named_while_others_are_missing(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        for pid in (11, 12, 11):
            answer = await bench.open("run", 0, 2, pid=pid)
        assert answer.missing_ranks == (1,)
        assert "processes 11 on h and 12 on h both came as rank 0: give" in answer.waiting_for
        assert (await bench.open("run", 1, 2)).ready
        await asyncio.sleep(0)

    on_bench(config, tmp_path / "state", check)


@pytest.mark.parametrize(
    ("peer", "peers", "words"), [(2, 2, "peer = 2 with peers = 2"), (0, 5000, "at most 4096")]
)
def test_peers_that_cannot_be_are_refused(
    peer: int, peers: int, words: str, config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        with pytest.raises(ConfigError, match=words):
            await bench.open("run", 0, 1, peer=peer, peers=peers)
        with pytest.raises(ConfigError, match="peer = 1: ranks of this session have 1 peers"):
            await bench.worker("w0")
            session = (await bench.open("one")).session
            await bench.steps(session, 0, done=0, peer=1)

    on_bench(config, tmp_path / "state", check)
