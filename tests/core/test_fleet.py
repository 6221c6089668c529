from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.fleet import (
    NOWHERE,
    decode_threads,
    plan_fleet,
    workers_of_node,
)


def test_one_stager_a_node_and_workers_spread() -> None:
    nodes = {"n1": 9, "n2": 9, "n3": 9}
    change = plan_fleet(nodes=nodes, stagers=["n2"], workers={"w": "n2"}, target=4)
    assert change.start_stagers == ("n1", "n3")
    assert Counter(change.start_workers) == {"n1": 2, "n3": 1}
    assert change.drain_workers == ()


def test_surplus_is_drained_from_the_fullest_nodes() -> None:
    workers = {"a": "n1", "b": "n1", "c": "n1", "d": "n2"}
    nodes = {"n1": 9, "n2": 9}
    change = plan_fleet(nodes=nodes, stagers=["n1", "n2"], workers=workers, target=2)
    assert len(change.drain_workers) == 2
    left = [workers[w] for w in workers if w not in change.drain_workers]
    assert Counter(left) == {"n1": 1, "n2": 1}
    assert change.start_workers == ()


def test_no_node_no_start() -> None:
    change = plan_fleet(nodes={}, stagers=[], workers={}, target=3)
    assert change.start_workers == () and change.start_stagers == ()
    change = plan_fleet(nodes={}, stagers=[], workers={}, target=3, wait_for_nodes=True)
    assert change.start_workers == (NOWHERE,) * 3


def test_what_no_node_has_room_for_is_placed_nowhere_and_goes_first() -> None:
    nodes = {"n1": 2, "n2": 1}
    change = plan_fleet(nodes=nodes, stagers=["n1", "n2"], workers={"a": "n1"}, target=5)
    assert Counter(change.start_workers) == {"n1": 1, "n2": 1, NOWHERE: 2}
    workers = {"a": "n1", "b": "n1", "c": NOWHERE, "d": "n2"}
    change = plan_fleet(nodes=nodes, stagers=["n1", "n2"], workers=workers, target=2)
    assert change.drain_workers == ("c", "b")


def test_drains_as_many_as_needed_wherever_they_are() -> None:
    workers = {"z": "n2", "a": "n1", "b": "n1"}
    nodes = {"n1": 9, "n2": 9}
    change = plan_fleet(nodes=nodes, stagers=["n1", "n2"], workers=workers, target=0)
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


def test_a_node_that_joins_gets_a_worker_of_a_crowded_one_once_the_new_one_is_up() -> None:
    nodes, workers = {"n1": 9, "n2": 9, "n3": 9}, {"a": "n1", "b": "n1", "c": "n2"}
    change = plan_fleet(nodes=nodes, stagers=list(nodes), workers=workers, target=3)
    assert (change.start_workers, change.drain_workers) == (("n3",), ())
    workers["d"] = "n3"
    change = plan_fleet(nodes=nodes, stagers=list(nodes), workers=workers, target=3, starting=True)
    assert (change.start_workers, change.drain_workers) == ((), ())
    change = plan_fleet(nodes=nodes, stagers=list(nodes), workers=workers, target=3)
    assert (change.start_workers, change.drain_workers) == ((), ("b",))
    del workers["b"]
    change = plan_fleet(nodes=nodes, stagers=list(nodes), workers=workers, target=3)
    assert (change.start_workers, change.drain_workers) == ((), ())


def test_a_node_without_room_gets_no_worker_of_a_crowded_one() -> None:
    workers = {"a": "n1", "b": "n1"}
    change = plan_fleet(nodes={"n1": 2, "n2": 0}, stagers=[], workers=workers, target=2)
    assert change.start_workers == change.drain_workers == ()


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.lists(st.integers(0, 6), max_size=8),
    st.integers(0, 8),
)
def test_workers_come_to_rest_evenly_spread(rooms: list[int], at: list[int], target: int) -> None:
    nodes = {f"n{i}": room for i, room in enumerate(rooms)}
    workers = {f"w{i}": f"n{node}" for i, node in enumerate(at)}
    for number in range(40):
        change = plan_fleet(nodes=nodes, stagers=[], workers=workers, target=target)
        if not change.start_workers and not change.drain_workers:
            break
        for i, node in enumerate(change.start_workers):
            workers[f"new{number}-{i}"] = node
        for gone in change.drain_workers:
            del workers[gone]
    else:
        raise AssertionError("it never comes to rest")
    assert len(workers) == target
    load = Counter({node: list(workers.values()).count(node) for node in nodes})
    free = [load[node] for node in nodes if load[node] < nodes[node]]
    assert not free or max(load.values()) <= min(free) + 1
