from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.lanes import lane_nodes


def mapped(lanes: int, names: Sequence[str], holders: Sequence[str] = ()) -> list[str]:
    return [names[i] for i in lane_nodes(lanes, names, holders)]


def hosts(count: int) -> list[str]:
    return [f"host-{i}.rack{i % 3}" for i in range(count)]


def moves(before: Sequence[str], after: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))


def least_moves(before: Sequence[str], names: Sequence[str]) -> int:
    """What any even mapping has to move: what absent nodes hold, and what is above a node's part;
    found apart from the code under test."""
    held = Counter(before)
    least, larger = divmod(len(before), len(names))
    above = sum(held[name] > least for name in names)
    return len(before) - sum(min(held[name], least) for name in names) - min(above, larger)


@pytest.mark.parametrize("lanes", [0, 1, 7, 32, 100])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9])
def test_every_node_has_an_even_part(lanes: int, nodes: int) -> None:
    held = Counter(mapped(lanes, hosts(nodes)))
    assert sum(held.values()) == lanes
    assert {held[name] for name in hosts(nodes)} <= {lanes // nodes, -(-lanes // nodes)}


def test_order_of_names_does_not_matter() -> None:
    names = ["a", "b", "c", "d"]
    holders = ["a", "", "gone", "b"] * 8
    for held in ((), holders):
        assert mapped(32, names[::-1], held) == mapped(32, names, held)


@pytest.mark.parametrize(("lanes", "nodes"), [(8, 2), (32, 8), (64, 8), (128, 16), (256, 64)])
def test_a_node_that_leaves_or_joins_moves_its_own_lanes_alone(lanes: int, nodes: int) -> None:
    names = hosts(nodes + 1)
    without = names[:-1]
    before = mapped(lanes, without)
    joined = mapped(lanes, names, before)
    assert moves(before, joined) == joined.count(names[-1]) == lanes // len(names)
    for gone in names:
        left = [name for name in names if name != gone]
        after = mapped(lanes, left, joined)
        assert moves(joined, after) == joined.count(gone)
    # hashing alone, which knows nothing of what was, moves more
    assert moves(before, mapped(lanes, names)) >= lanes // len(names)


def test_a_node_that_comes_back_has_its_lanes_again() -> None:
    names = hosts(5)
    before = mapped(40, names)
    for gone in names:
        assert mapped(40, [name for name in names if name != gone], before).count(gone) == 0
        assert mapped(40, names, before) == before


@given(st.integers(1, 80), st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=2, max_size=8))
def test_no_change_of_nodes_moves_more_than_it_must(lanes: int, rounds: list[set[int]]) -> None:
    held: list[str] = []
    for present in rounds:
        names = [f"n{i}" for i in present]
        after = mapped(lanes, names, held)
        counts = Counter(after)
        assert {counts[name] for name in names} <= {lanes // len(names), -(-lanes // len(names))}
        if held:
            assert moves(held, after) == least_moves(held, names)
        held = after


@pytest.mark.parametrize(
    ("lanes", "names", "holders", "match"),
    [
        (4, [], [], "empty"),
        (4, ["a", "a"], [], "twice"),
        (-1, ["a"], [], "negative"),
        (4, ["a"], ["a"], "holders names 1 lanes; num_lanes is 4"),
    ],
)
def test_wrong_arguments(lanes: int, names: list[str], holders: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lane_nodes(lanes, names, holders)
