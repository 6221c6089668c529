"""Trainers in a network namespace of their own whose cable is pulled: real packets that nobody
gets, real retransmission, and the same packs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.demo_config import demo_config
from support.namespaces import Namespace, lacks
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.proxied_service import ProxiedService
from support.rank_processes import RankProcesses

JOB, DP, MICRO, STEPS = "test", 2, 2, 30
MOST_S = 45.0

pytestmark = pytest.mark.slow


@functools.cache
def missing() -> str:
    return lacks()


def run_cut(folder: Path, cut: Callable[[Namespace], None]) -> None:
    if missing():
        pytest.skip(missing())
    config = demo_config(folder, staging={"cache_dir": None})
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    own = dataclasses.replace(config, state_dir=str(folder / "other"))
    with (
        nothing_leaks(),
        Namespace() as namespace,
        ProxiedService(own, folder, host=namespace.host) as service,
        RankProcesses(
            service.endpoint,
            folder / "ranks",
            job=JOB,
            dp_size=DP,
            micro_steps=MICRO,
            steps=STEPS,
            pause_s=0.02,
            prefetch_packs=2,
            timeout_s=MOST_S,
            within=namespace.command,
        ) as ranks,
    ):
        ranks.wait_for_step(2)
        cut(namespace)
        assert ranks.wait(120) == dict.fromkeys(range(DP), 0), ranks.errors
        retries = sum(ranks.stats(rank)["retries"] for rank in range(DP))
    prove_same(clean, ranks.deliveries())
    gap_s = longest_gap(ranks.deliveries())
    print(f"recovered in {gap_s:.1f} s after the cut began, {retries} retries")
    assert retries > 0 or gap_s > 0.5


def pulled(seconds: float) -> Callable[[Namespace], None]:
    def cut(namespace: Namespace) -> None:
        namespace.pull()
        time.sleep(seconds)
        namespace.plug()

    return cut


def without_carrier(namespace: Namespace) -> None:
    namespace.down()
    time.sleep(3.0)
    namespace.up()


def test_pulled_for_a_moment(tmp_path: Path) -> None:
    run_cut(tmp_path, pulled(2.0))


def test_pulled_for_longer_than_the_keepalive(tmp_path: Path) -> None:
    run_cut(tmp_path, pulled(18.0))


def test_a_link_that_goes_down_and_up(tmp_path: Path) -> None:
    run_cut(tmp_path, without_carrier)
