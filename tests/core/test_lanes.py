from __future__ import annotations

from collections import Counter

import pytest

from dataservice.core.lanes import lane_nodes


@pytest.mark.parametrize("lanes", [1, 7, 32, 100])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_no_node_is_above_its_cap(lanes: int, nodes: int) -> None:
    homes = lane_nodes(lanes, [f"node{i}" for i in range(nodes)])
    assert len(homes) == lanes
    assert max(Counter(homes).values()) <= -(-lanes // nodes)
    assert set(homes) <= set(range(nodes))


def test_order_of_names_does_not_matter() -> None:
    names = ["a", "b", "c", "d"]
    by_name = [names[i] for i in lane_nodes(32, names)]
    turned = names[::-1]
    assert [turned[i] for i in lane_nodes(32, turned)] == by_name


def test_few_lanes_move_when_a_node_leaves() -> None:
    names = [f"node{i}" for i in range(8)]
    before = [names[i] for i in lane_nodes(64, names)]
    for gone in names:
        left = [name for name in names if name != gone]
        after = [left[i] for i in lane_nodes(64, left)]
        moved = sum(a != b for a, b in zip(before, after, strict=True))
        assert before.count(gone) <= moved <= before.count(gone) + 8


@pytest.mark.parametrize(
    ("lanes", "names", "match"),
    [(4, [], "empty"), (4, ["a", "a"], "twice"), (-1, ["a"], "negative")],
)
def test_wrong_arguments(lanes: int, names: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lane_nodes(lanes, names)
