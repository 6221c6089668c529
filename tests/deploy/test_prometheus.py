"""Prometheus itself, with the example's configuration, beside a running service."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.local_service import LocalService
from support.scrape import get_json

from dataservice.actors.coordinator_web import start_coordinator_web
from trainer_client import PackStream, ParallelLayout

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
EMPTY_WHEN_WELL = (
    "dataservice_samples_quarantined_total",
    "dataservice_pack_fill_ratio",
    "dataservice_start_time_seconds",
    "isolated",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalService, str, str]]:
    """Under a trainer that reads; addresses of the coordinator's and the trainer's metrics."""
    config = demo_config(tmp_path_factory.mktemp("service"))
    with LocalService(config, workers=2) as service:
        loop = service._loop
        web = loop.run(
            start_coordinator_web(
                service.coordinator, config.serving, port=service._port, again=None
            )
        )
        assert web is not None
        with PackStream(
            service.endpoint, job="test", layout=ParallelLayout(), micro_steps=2, metrics_port=0
        ) as stream:
            for _ in range(6):
                next(stream)
            yield service, web.url.partition("//")[2], stream.metrics_address
        loop.run(web.stop())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def prometheus(
    service: tuple[LocalService, str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not here: apt-get install prometheus")
    _, coordinator, trainer = service
    folder = tmp_path_factory.mktemp("prometheus")
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace('"TRAINER:9400", "TRAINER:9401"', f'"{trainer}"')
    text = text.replace("COORDINATOR:7071", coordinator)
    text = text.replace("scrape_interval: 15s", "scrape_interval: 1s").replace("30s", "1s")
    (folder / "prometheus.yml").write_text(text)
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    (folder / "rules.yml").write_text(rules.replace("interval: 30s", "interval: 1s"))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def until(ask: Callable[[], Any], *, timeout_s: float = 40.0) -> Any:
    end = time.monotonic() + timeout_s
    while True:
        try:
            if found := ask():
                return found
        except OSError:
            pass
        assert time.monotonic() < end, "Prometheus has not seen it in time"
        time.sleep(0.3)


def query(url: str, expression: str) -> list[dict[str, Any]]:
    asked = urllib.parse.urlencode({"query": expression})
    answer = get_json(f"{url}/api/v1/query?{asked}")
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_it_finds_everybody(prometheus: str, service: tuple[LocalService, str, str]) -> None:
    def all_up() -> list[dict[str, Any]]:
        targets = get_json(f"{prometheus}/api/v1/targets")["data"]["activeTargets"]
        return targets if len(targets) == 5 and all(t["health"] == "up" for t in targets) else []

    targets = until(all_up)
    roles = sorted(target["labels"].get("role", "trainer") for target in targets)
    assert roles == ["coordinator", "stager", "trainer", "worker", "worker"]
    ids = {t["labels"]["id"] for t in targets if t["labels"].get("role") == "worker"}
    assert ids == set(service[0].workers)
    series = until(lambda: query(prometheus, "dataservice_packs_total"))
    assert {s["metric"]["job"] for s in series} == {"test"}, "no exported_job"
    assert sum(float(s["value"][1]) for s in series) >= 6


def test_every_panel_has_something_to_show(prometheus: str) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dataservice.json").read_text())
    asked = [
        target["expr"].replace("$job", "test").replace("$__rate_interval", "30s")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    shown = [text for text in asked if not any(word in text for word in EMPTY_WHEN_WELL)]
    assert len(shown) > len(asked) - 6

    def lacking() -> list[str]:
        return [text for text in shown if not query(prometheus, text)]

    until(lambda: not lacking())


def test_nothing_alarms_while_all_is_well(prometheus: str) -> None:
    rules = get_json(f"{prometheus}/api/v1/rules")["data"]["groups"][0]["rules"]
    assert len(rules) > 8
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = [r["name"] for r in rules if r.get("state") == "firing"]
    assert not firing
