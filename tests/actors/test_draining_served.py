"""Workers, nodes and the service drain under a run: every pack arrives, and none twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.demo_config import demo_config, own_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService

from dataservice.config import Config
from dataservice.errors import DataServiceError

SIZES: dict[str, Any] = {"job": "test", "dp_size": 2, "micro_steps": 2}
STEPS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("draining"))


@pytest.fixture(scope="module")
def calm(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    config = own_config(base, tmp_path_factory.mktemp("calm"))
    with LocalService(config, workers=1) as service:
        return read_ranks(service.endpoint, steps=STEPS, **SIZES)


class DrainOnce:
    """`dataservice drain --wait` in a thread of its own, begun at the first batch."""

    def __init__(self, service: LocalService, *options: str) -> None:
        self.codes: list[int] = []
        arguments = ("drain", service.endpoint, "--wait", "--timeout-s", "60", *options)
        self._thread = threading.Thread(target=lambda: self.codes.append(run(*arguments)))
        self._lock = threading.Lock()
        self._begun = False

    def __call__(self, _batch: object) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._thread.start()

    def end(self) -> list[int]:
        self._thread.join(90)
        return self.codes


def drained_under_a_run(
    config: Config, *options: str, look: Callable[[LocalService], None]
) -> Readers:
    with LocalService(config, workers=2, nodes=("n0", "n1")) as service:
        drain = DrainOnce(service, *options)
        readers = read_ranks(service.endpoint, steps=STEPS, on_batch=drain, pause_s=0.02, **SIZES)
        assert drain.end() == [0]
        look(service)
    return readers


@pytest.mark.parametrize("options", [(), ("--now",)], ids=["in order", "now"])
def test_a_worker_drains(
    base: Config, calm: Readers, tmp_path: Path, options: tuple[str, ...]
) -> None:
    def look(service: LocalService) -> None:
        assert [worker["id"] for worker in service.status()["workers"]] == ["w1-n1"]

    config = own_config(base, tmp_path)
    readers = drained_under_a_run(config, "--worker", "w0-n0", *options, look=look)
    assert readers.digests_of_packs() == calm.digests_of_packs()
    assert len(readers.deliveries) == len(calm.deliveries)


def test_a_node_drains(base: Config, calm: Readers, tmp_path: Path) -> None:
    def look(service: LocalService) -> None:
        status = service.status()
        assert {worker["node"] for worker in status["workers"]} == {"n1"}
        lanes = {stager["node"]: len(stager["lanes"]) for stager in status["stagers"]}
        assert (lanes["n0"], lanes["n1"]) == (0, 4)
        assert status["drained_nodes"] == ["n0"]
        assert run("drain", service.endpoint, "--node", "n0", "--undo") == 0
        lanes = {stager["node"]: len(stager["lanes"]) for stager in service.status()["stagers"]}
        assert (lanes["n0"], lanes["n1"]) == (2, 2)

    readers = drained_under_a_run(own_config(base, tmp_path), "--node", "n0", look=look)
    assert readers.digests_of_packs() == calm.digests_of_packs()


def test_the_service_drains_and_goes_on_when_it_is_served_again(
    base: Config, calm: Readers, tmp_path: Path
) -> None:
    config = own_config(base, tmp_path)
    with LocalService(config, workers=1) as service:
        drain = DrainOnce(service)
        with pytest.raises(DataServiceError):
            read_ranks(service.endpoint, steps=STEPS, on_batch=drain, timeout_s=5.0, **SIZES)
        assert drain.end() == [0]
        status = service.status()
        assert status["winding_down"]
        # no rank was left behind another: each has all that any was told of
        assert {tuple(done) for done in status["session"]["done"]} == {
            (status["session"]["done_step"], 0)
        }
        assert 0 < status["session"]["done_step"] < STEPS + 6
    with LocalService(config, workers=1) as service:
        again = read_ranks(service.endpoint, steps=STEPS, **SIZES)
    assert again.digests_of_packs() == calm.digests_of_packs()
