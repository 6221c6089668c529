"""Connections of trainers and workers that are reset, cut, delayed, frozen or half open: the same
packs as ever, within a bounded time."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.proxied_service import ProxiedService

from dataservice.config import Config
from trainer_client import session as client_session

JOB, DP, MICRO, STEPS = "test", 2, 2, 10
MOST_S = 60.0
"""No wait of a trainer may come near it; what is measured is printed."""

Break = Callable[[ProxiedService], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("network"), staging={"cache_dir": None})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a client's calls shortened; how long the real ones take is a slow test."""
    monkeypatch.setattr(client_session, "BUILD_WAIT_S", 1.0)
    monkeypatch.setattr(client_session, "GRACE_S", 1.0)
    monkeypatch.setattr("trainer_client.prefetch.POLL_S", 1.0)


@contextmanager
def proxied(config: Config, folder: Path, **shares: Any) -> Iterator[ProxiedService]:
    own = dataclasses.replace(config, state_dir=str(folder / "state"))
    clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)  # what gRPC keeps is there then
    with nothing_leaks(), ProxiedService(own, folder, **shares) as service:
        yield service


def read(service: ProxiedService, on_batch: Callable[[Any], None] | None = None) -> Readers:
    return read_ranks(
        service.endpoint,
        job=JOB,
        dp_size=DP,
        micro_steps=MICRO,
        steps=STEPS,
        on_batch=on_batch,
        prefetch_packs=2,
        timeout_s=MOST_S,
    )


def read_through(service: ProxiedService, config: Config, breaks: dict[int, Break]) -> Readers:
    """Reads all steps; when so many batches have come, each thing of `breaks` happens once."""
    count, lock = itertools.count(1), threading.Lock()

    def happen(_: Any) -> None:
        with lock:
            broken = breaks.get(next(count))
            if broken is not None:
                broken(service)

    readers = read(service, happen)
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    prove_same(clean, readers.deliveries)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s, {readers.retries} retries")
    return readers


def each(name: str, *arguments: Any, of: str = "all") -> Break:
    """The fault at every proxy: "control" (trainers to coordinator), "members" (workers to
    coordinator), "data" (trainers to workers) or "all"."""

    def broken(service: ProxiedService) -> None:
        proxies = {
            "control": [service.control],
            "members": [service.members],
            "data": list(service.data.values()),
            "all": service.all_proxies(),
        }[of]
        for proxy in proxies:
            getattr(proxy, name)(*arguments)

    return broken


def later(seconds: float, broken: Break) -> Break:
    def start(service: ProxiedService) -> None:
        timer = threading.Timer(seconds, broken, [service])
        timer.daemon = True
        timer.start()

    return start


def both(*breaks: Break) -> Break:
    def broken(service: ProxiedService) -> None:
        for one in breaks:
            one(service)

    return broken


def test_connections_that_are_reset(config: Config, tmp_path: Path) -> None:
    with proxied(config, tmp_path) as service:
        resets = {batches: each("reset") for batches in range(4, 36, 4)}
        readers = read_through(service, config, resets)
        assert service.control.accepted > DP  # they came back
        assert readers.local_packs == 0


def test_packs_that_are_cut_in_the_middle(config: Config, tmp_path: Path) -> None:
    with proxied(config, tmp_path) as service:
        cuts = {n: each("cut_after", 1000 + 1000 * n, of="data") for n in range(1, 30, 4)}
        readers = read_through(service, config, cuts)
        print(f"{(done := sum(proxy.cuts for proxy in service.data.values()))} cuts")
        assert done >= 2
        assert readers.retries >= 2


def test_answers_of_the_coordinator_that_are_cut_in_the_middle(
    config: Config, tmp_path: Path
) -> None:
    with proxied(config, tmp_path) as service:
        cuts = {n: each("cut_after", 50 * n, of="control") for n in (2, 6, 10, 14, 18, 22)}
        read_through(service, config, cuts)
        assert service.control.accepted > DP


def test_a_slow_network(config: Config, tmp_path: Path) -> None:
    with proxied(config, tmp_path) as service:
        readers = read_through(service, config, {1: each("delay", 0.03)})
        assert readers.waited_s > 0


def test_a_cable_that_is_pulled_and_put_back(config: Config, tmp_path: Path) -> None:
    """Shorter than any deadline: nobody is lost, and what was sent meanwhile arrives."""
    pulled = both(each("freeze"), later(0.7, each("thaw")))
    with proxied(config, tmp_path) as service:
        readers = read_through(service, config, {8: pulled, 20: pulled})
        assert longest_gap(readers.deliveries) > 0.3


def test_workers_cut_off_for_longer_than_their_lease(config: Config, tmp_path: Path) -> None:
    """They are lost, join anew once they can, and what they had was given to nobody: all were."""
    cut = both(each("freeze", of="members"), later(3.0, each("heal", of="members")))
    with proxied(config, tmp_path) as service:
        read_through(service, config, {8: cut})
        assert service.status()["counters"]["workers_lost"] >= 1


SLOW = pytest.mark.slow


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("of", ["control", "data", pytest.param("members", marks=SLOW)])
def test_half_open_connections(config: Config, tmp_path: Path, of: str) -> None:
    """The other end is gone and nobody says so; a new connection would work."""
    with proxied(config, tmp_path) as service:
        proxies = {"control": [service.control], "members": [service.members]}
        readers = read_through(service, config, {8: each("drop", of=of)})
        watched = proxies.get(of) or list(service.data.values())
        accepted = sum(proxy.accepted for proxy in watched)
        assert accepted > len(watched)  # a second connection was made
        assert of == "members" or readers.retries >= 1
        service.control.heal()


@pytest.mark.slow
@pytest.mark.parametrize("of", ["control", "data", "members"])
def test_half_open_connections_with_the_deadlines_of_a_job(
    config: Config, tmp_path: Path, of: str
) -> None:
    with proxied(config, tmp_path) as service:
        readers = read_through(service, config, {8: each("drop", of=of)})
        assert longest_gap(readers.deliveries) < 30.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 6))])
def test_messages_that_come_twice_late_or_are_lost(
    config: Config, tmp_path: Path, seed: int
) -> None:
    """To and from the coordinator, of trainers and workers: requests that are handled twice, or
    again behind newer ones, and answers that never come."""
    with proxied(config, tmp_path, seed=seed, twice=0.2, late=0.2, lost=0.1) as service:
        readers = read_through(service, config, {})
        done = service.messages.done
        assert min(done["twice"], done["late"], done["lost GetSteps"]) >= 1
        assert readers.retries >= 1
        print(dict(done))
