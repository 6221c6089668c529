from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.fleet import (
    decode_threads,
    plan_fleet,
    workers_at_start,
    workers_of_node,
)


def test_one_stager_a_node_and_workers_spread() -> None:
    change = plan_fleet(nodes=["n1", "n2", "n3"], stagers=["n2"], workers={"w": "n2"}, target=4)
    assert change.start_stagers == ("n1", "n3")
    assert Counter(change.start_workers) == {"n1": 2, "n3": 1}
    assert change.drain_workers == ()


def test_surplus_is_drained_from_the_fullest_nodes() -> None:
    workers = {"a": "n1", "b": "n1", "c": "n1", "d": "n2"}
    change = plan_fleet(nodes=["n1", "n2"], stagers=["n1", "n2"], workers=workers, target=2)
    assert len(change.drain_workers) == 2
    left = [workers[w] for w in workers if w not in change.drain_workers]
    assert Counter(left) == {"n1": 1, "n2": 1}
    assert change.start_workers == ()


def test_no_node_no_start() -> None:
    change = plan_fleet(nodes=[], stagers=[], workers={}, target=3)
    assert change.start_workers == () and change.start_stagers == ()


def test_drains_as_many_as_needed_wherever_they_are() -> None:
    workers = {"z": "n2", "a": "n1", "b": "n1"}
    change = plan_fleet(nodes=["n1", "n2"], stagers=["n1", "n2"], workers=workers, target=0)
    assert set(change.drain_workers) == set(workers)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 2), (96, 48, 2)],
)
def test_a_machine_has_the_fewest_workers_whose_threads_cover_its_cores(
    cores: int, workers: int, threads: int
) -> None:
    assert (workers_of_node(cores), decode_threads(cores)) == (workers, threads)


@settings(deadline=None)
@given(st.integers(1, 512))
def test_no_core_is_without_a_thread_and_few_threads_without_a_core(cores: int) -> None:
    workers, threads = workers_of_node(cores), decode_threads(cores)
    assert cores <= workers * threads < cores + workers
    assert threads <= 2


def test_workers_at_the_start_are_those_of_all_nodes_within_the_bounds() -> None:
    assert workers_at_start([8, 2, 16], least=1, most=64) == 13
    assert workers_at_start([8, 2, 16], least=1, most=5) == 5
    assert workers_at_start([], least=2, most=5) == 2
