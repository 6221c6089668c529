"""What the coordinator answers over HTTP, in the service without Ray."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_config, demo_settings, write_config
from support.harness import read_ranks
from support.local_service import LocalService

from dataservice import __version__
from dataservice.actors.coordinator_web import routes
from dataservice.config import load_config
from dataservice.wire.messages import GetStatus, StatusReport
from dataservice.wire.staging import PullStaging, RegisterStager

EVENT = {"at_s": float, "kind": str, "text": str, "level": str, "count": int}


def get(service: LocalService, path: str) -> Any:
    with urllib.request.urlopen(service.page_url + path, timeout=10) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    config = demo_config(tmp_path_factory.mktemp("web"), serving={"lease_s": 5.0})
    with LocalService(config, workers=2, nodes=("n0", "n1"), web=True) as service:
        yield service


def test_before_a_trainer_comes(service: LocalService) -> None:
    status = get(service, "/api/status")
    assert status["session"] is None
    assert status["fill"] is None
    assert status["verdict"]["text"] == "No trainer has come yet"
    assert (status["version"], status["pack_length"]) == (__version__, 2048)
    assert status["http_port"] == int(service.page_url.rpartition(":")[2])
    assert 0 < status["now_s"] - status["started_s"] < 600
    assert get(service, "/api/step") == {"step": None}


def test_a_run_is_told_as_it_goes(service: LocalService) -> None:
    stop = threading.Event()

    def on_batch(batch: Any) -> None:
        stop.wait(0.1)

    reading = threading.Thread(
        target=read_ranks,
        args=(service.endpoint,),
        kwargs={"job": "test", "dp_size": 4, "micro_steps": 8, "steps": 7, "on_batch": on_batch},
    )
    reading.start()
    try:
        status: dict[str, Any] = {}
        until = time.monotonic() + 60
        while not ((status.get("session") or {}).get("done_step", 0) > 2 and status["holes"]):
            assert time.monotonic() < until
            time.sleep(0.1)
            status = get(service, "/api/status")
        grid = get(service, "/api/step")
    finally:
        stop.set()
        reading.join(60)
    session = status["session"]
    assert len(session["waited_share"]) == len(session["waited_workers_share"]) == 4
    assert all(0 <= share <= 1 for share in session["waited_share"])
    assert 0.5 < status["fill"] <= 1
    rates = status["rates"]
    assert rates["packs_per_s"] > 0
    assert rates["steps_per_s"] > 0
    assert rates["images_per_s"] > 0
    assert rates["decoded_bytes_per_s"] > rates["images_per_s"] * 3 * 14 * 14
    assert sum(worker["images_per_s"] for worker in status["workers"]) > 0
    assert all(0 <= worker["busy_share"] <= 1 for worker in status["workers"])
    for stager in status["stagers"]:
        assert stager["left_s"] is None or stager["left_s"] >= 0
        assert stager["hit_rate"] is None or 0 <= stager["hit_rate"] <= 1
    assert sum(status["holes_by_reason"].values()) == status["holes"] == 1
    assert list(status["holes_by_reason"]) == ["truncated JPEG"]
    kinds = [event["kind"] for event in status["events"]]
    assert {"started", "stager joined", "worker joined", "session", "hole"} <= set(kinds)
    assert kinds.index("worker joined") < kinds.index("session") < kinds.index("hole")
    for event in status["events"]:
        assert {name: type(value) for name, value in event.items()} == EVENT
    assert session["done_step"] <= grid["step"] <= session["done_step"] + 2
    assert [len(row) for row in grid["cost"]] == [4] * 8


def test_the_page_and_its_files_are_there_and_nothing_else(service: LocalService) -> None:
    kinds = {}
    for path in ("/", "/page.css", "/page.js", "/grid.js"):
        with urllib.request.urlopen(service.page_url + path, timeout=10) as answer:
            kinds[path] = answer.headers["Content-Type"].partition(";")[0]
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    scripts = dict.fromkeys(("/page.js", "/grid.js"), "text/javascript")
    assert kinds == {"/": "text/html", "/page.css": "text/css", **scripts}
    for path in ("/page.html", "/api", "/__init__.py", "/%2e%2e/web.py"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(service.page_url + path, timeout=10)


# ---- the coordinator alone ----------------------------------------------------------------------


def test_events_of_a_fleet_that_changes(tmp_path: Path) -> None:
    config = load_config(str(write_config(tmp_path, demo_settings(tmp_path))))

    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.fail("w0", session, "0.0", fatal=False)
        await bench.worker("w1", node="n" * 56)
        await bench.lose("w1")
        bench.coordinator.work.drain(("w0",))
        await bench.pull("w0", session, retiring="it was asked to end")
        bench.coordinator.wind_down()
        events = (await bench.status())["events"]
        assert [(event["kind"], event["level"]) for event in events] == [
            ("started", "info"),
            ("worker joined", "info"),
            ("session", "info"),
            ("pack failed", "warning"),
            ("worker joined", "info"),
            ("worker lost", "warning"),
            ("worker retires", "info"),
            ("stopping", "info"),
        ]
        assert events[4]["text"] == f"worker w1 joined on node {'n' * 12}"
        assert events[5]["text"].startswith("worker w1 is gone (silent for ")

    on_bench(config, tmp_path / "own", check)


def test_a_run_whose_ranks_arrive(tmp_path: Path) -> None:
    config = load_config(str(write_config(tmp_path, demo_settings(tmp_path))))

    async def check(bench: Bench) -> None:
        assert (await bench.status())["opening"] is None
        await bench.worker("w0")
        await bench.open("run", rank=1, ranks=3)
        status = await bench.status()
        assert status["opening"]["missing_ranks"] == [0, 2]
        assert status["verdict"]["text"] == "The run waits for 2 of 3 ranks to come"

    on_bench(config, tmp_path / "own", check)


def test_a_stager_tells_how_long_it_has_left(tmp_path: Path) -> None:
    config = load_config(str(write_config(tmp_path, demo_settings(tmp_path))))

    async def check(bench: Bench) -> None:
        await bench.worker("w0", node="n0")
        await bench.pull("w0", 0, read_staged_bytes=30, read_origin_bytes=10)
        staging = bench.coordinator.staging
        seat = await staging.register_stager(
            RegisterStager(node="n0", host="h0", cache_dir="/c", budget_bytes=100)
        )
        for missing, rate, left_s in ((0, 0.0, 0.0), (500, 0.0, None), (500, 50.0, 10.0)):
            await staging.pull_staging(
                PullStaging(
                    node="n0",
                    lease=seat.lease,
                    version=-1,
                    wait_s=0.0,
                    cached_bytes=1,
                    cached_shards=1,
                    copied_bytes=1,
                    evictions=0,
                    errors=0,
                    missing_bytes=missing,
                    bytes_per_s=rate,
                )
            )
            status = await bench.status()
            (stager,) = status["stagers"]
            assert (stager["left_s"], stager["hit_rate"]) == (left_s, 0.75)
            assert status["rates"]["staged_bytes_per_s"] == rate

    on_bench(config, tmp_path / "own", check)


def test_many_who_look_cost_no_more_than_one() -> None:
    asked: list[GetStatus] = []

    async def get_status(request: GetStatus) -> StatusReport:
        asked.append(request)
        return StatusReport(status="{}")

    coordinator: Any = SimpleNamespace(get_status=get_status, shared=None)

    async def check() -> None:
        status = routes(coordinator)["/api/status"]
        answers = [await status({}) for _ in range(50)]
        assert {answer.body for answer in answers} == {b"{}"}
        assert len(asked) == 1
        await asyncio.sleep(0.6)
        await status({})
        assert len(asked) == 2

    asyncio.run(check())
