from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.demo_config import demo_settings, write_config

from dataservice.actors.launch import sized
from dataservice.config import Config, load_config
from dataservice.core.fleet import workers_of_node


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = demo_settings(tmp_path, workers={"count": "auto", "max": 6})
    return load_config(write_config(tmp_path, settings))


def node(cores: float | None, *, alive: bool = True, data: bool = True) -> dict[str, Any]:
    resources = {} if cores is None else {"CPU": cores}
    return {"Alive": alive, "Resources": resources | ({"data_node": 1.0} if data else {})}


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        ([node(4.0), node(2.0), node(64.0, alive=False), node(64.0, data=False)], 3),
        ([node(4.0), node(None)], 3),
        ([node(64.0)], 6),
        ([], 1),
    ],
)
def test_the_number_of_workers_follows_from_the_cores_of_the_data_nodes(
    config: Config, nodes: list[dict[str, Any]], count: int
) -> None:
    ray = SimpleNamespace(nodes=lambda: nodes)
    assert sized(config, ray, local=False).workers.count == count


def test_a_ray_of_our_own_has_the_cores_of_this_machine(config: Config) -> None:
    ray = SimpleNamespace(nodes=lambda: [node(1000.0)])
    expected = min(6, workers_of_node(len(os.sched_getaffinity(0))))
    assert sized(config, ray, local=True).workers.count == expected


def test_a_number_in_the_config_stays(config: Config) -> None:
    workers = dataclasses.replace(config.workers, count=5)
    config = dataclasses.replace(config, workers=workers)
    assert sized(config, SimpleNamespace(), local=True) is config
