from __future__ import annotations

from typing import Any

import pytest

from dataservice.actors.ray_nodes import DataNode, data_nodes, workers_of_nodes


def node(name: str, cpus: float | None, *, alive: bool = True, data: bool = True) -> dict[str, Any]:
    resources = {} if cpus is None else {"CPU": cpus}
    return {
        "NodeID": name,
        "NodeManagerHostname": f"host-{name}",
        "Alive": alive,
        "Resources": resources | ({"data_node": 1.0} if data else {}),
    }


def found(*nodes: dict[str, Any], num_cpus: float = 1.0, own: int | None = None) -> list[DataNode]:
    return list(data_nodes(nodes, resource="data_node", num_cpus=num_cpus, own_cores=own).values())


def test_only_living_nodes_with_the_resource_count() -> None:
    nodes = found(
        node("a", 4.0), node("b", 64.0, alive=False), node("c", 64.0, data=False), node("d", None)
    )
    assert [(n.node_id, n.host, n.cores, n.room) for n in nodes] == [
        ("a", "host-a", 4, 4),
        ("d", "host-d", 0, 0),
    ]


@pytest.mark.parametrize(
    ("cpus", "workers"), [([4.0, 2.0], 3), ([4.0, None], 3), ([64.0], 32), ([], 0)]
)
def test_the_number_of_workers_follows_from_the_cores(
    cpus: list[float | None], workers: int
) -> None:
    nodes = found(*(node(str(i), count) for i, count in enumerate(cpus)))
    assert workers_of_nodes(nodes) == workers


def test_a_ray_of_our_own_has_the_cores_of_this_machine() -> None:
    (mine,) = found(node("a", 1000.0), own=6)
    assert (mine.cores, mine.room) == (6, 1000)


@pytest.mark.parametrize(
    ("num_cpus", "room"), [(0.1, 30), (1.0, 3), (2.0, 1), (4.0, 0), (0.0, 1 << 20)]
)
def test_room_is_what_the_cpus_of_workers_leave(num_cpus: float, room: int) -> None:
    assert found(node("a", 3.0), num_cpus=num_cpus)[0].room == room
