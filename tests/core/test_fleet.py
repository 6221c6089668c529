from collections import Counter

from dataservice.core.fleet import plan_fleet


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
