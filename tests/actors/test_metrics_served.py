"""What Prometheus reads of a running coordinator, its workers and its stagers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.demo_config import demo_config
from support.local_service import LocalService
from support.scrape import Samples, get, get_json, missing, one, samples_of

from dataservice.actors.coordinator_metrics import coordinator_sheet, targets
from dataservice.actors.coordinator_web import start_coordinator_web
from dataservice.config import Config
from trainer_client import PackStream, ParallelLayout

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
STEPS = 3
TIERS = ("staged", "origin")
UNMET = {"samples_quarantined_total", "samples_changed_total"}
"""Of what did not come up: the data is well."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("metrics"))


@pytest.fixture(scope="module")
def scraped(config: Config) -> Iterator[tuple[LocalService, str]]:
    """After some steps of one rank; the URL of the coordinator."""
    with LocalService(config, workers=2) as service:
        web = service._loop.run(
            start_coordinator_web(
                service.coordinator, config.serving, port=service._port, again=None
            )
        )
        assert web is not None
        with PackStream(
            service.endpoint, job=config.job, layout=ParallelLayout(), micro_steps=2, local=False
        ) as stream:
            for _ in range(2 * STEPS):
                next(stream)
            service.stager_when(lambda s: s["missing_bytes"] == 0 and s["copied_bytes"] > 0)
            yield service, web.url
        service._loop.run(web.stop())


def by_role(url: str, role: str) -> dict[str, Samples]:
    """Id to what it tells."""
    found = {}
    for target in get_json(f"{url}/sd"):
        labels = target["labels"]
        if labels["role"] == role:
            where = f"{labels['__scheme__']}://{target['targets'][0]}/metrics"
            found[labels["id"]] = samples_of(get(where).decode(), role)  # type: ignore[arg-type]
    return found


def test_the_coordinator_says_whether_a_rank_waits(scraped: tuple[LocalService, str]) -> None:
    service, url = scraped
    found = samples_of(get(f"{url}/metrics").decode(), "coordinator")
    status = service.status()
    assert one(found, "state", state="serving") == 1 and one(found, "state", state="failed") == 0
    assert one(found, "open_ranks") == 1
    assert one(found, "session") == status["session"]["generation"] > 0
    assert one(found, "stream_step", dp_rank="0") >= STEPS - 1
    assert one(found, "rank_waited_seconds_total", dp_rank="0") > 0
    assert 1 <= one(found, "plan_imbalance_ratio") <= one(found, "arrival_imbalance_ratio") + 1e-9
    assert one(found, "steps_planned_total") == status["counters"]["steps_planned"] >= STEPS
    assert one(found, "workers", state="usable") == 2 and one(found, "stagers") == 1
    assert one(found, "worker_restarts_total", role="worker", cause="lost") == 0
    given = {"fill": "pack_fill_ratio", "started_s": "start_time_seconds"}
    unmet = UNMET | {name for field, name in given.items() if field not in status}
    assert missing(found, "coordinator") <= {f"dataservice_{name}" for name in unmet}


def test_workers_say_what_they_built_and_served(scraped: tuple[LocalService, str]) -> None:
    service, url = scraped
    workers = by_role(url, "worker")
    assert set(workers) == set(service.workers)
    for found in workers.values():
        assert not missing(found, "worker")
        assert one(found, "ready_bytes") <= one(found, "ready_bound_bytes")
        assert one(found, "rpc_inflight_bytes") == 0
        assert one(found, "memory_bytes") > 1 << 20
    assert sum(one(found, "packs_total") for found in workers.values()) >= 2 * STEPS
    assert sum(one(found, "served_bytes_total") for found in workers.values()) > 1 << 16
    images = sum(one(found, "images_total") for found in workers.values())
    decoded = [
        f["dataservice_decode_seconds_count"][("kind", "picture"),] for f in workers.values()
    ]
    took = [f["dataservice_decode_seconds_sum"][("kind", "picture"),] for f in workers.values()]
    assert sum(decoded) >= images > 0 and sum(took) > 0
    for found in workers.values():
        buckets = found["dataservice_decode_seconds_bucket"]
        assert buckets[("kind", "picture"), ("le", "+Inf")] in decoded
    tiers = [one(f, "staging_bytes_total", tier=t) for f in workers.values() for t in TIERS]
    assert sum(tiers) > 0


def test_stagers_say_what_they_copied(scraped: tuple[LocalService, str]) -> None:
    service, url = scraped
    (found,) = by_role(url, "stager").values()
    figures = service.status()["stagers"][0]
    assert not missing(found, "stager")
    assert one(found, "staging_bytes_total", tier="copied") == figures["copied_bytes"] > 0
    assert one(found, "cache_bytes") == figures["cached_bytes"] <= one(found, "cache_budget_bytes")
    assert one(found, "cache_budget_bytes") == 1 << 30


def test_figures_are_for_those_with_the_token(
    scraped: tuple[LocalService, str], config: Config, tmp_path: Path
) -> None:
    service, _ = scraped
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    serving = dataclasses.replace(config.serving, token_file=str(token))
    web = service._loop.run(start_coordinator_web(service.coordinator, serving, port=0, again=None))
    assert web is not None
    try:
        for path in ("/metrics", "/sd"):
            with pytest.raises(HTTPError, match="401"):
                get(web.url + path)
            asked = Request(web.url + path, headers={"Authorization": "Bearer 0123456789abcdef"})
            with urlopen(asked, timeout=10) as answer:
                assert answer.status == 200
    finally:
        service._loop.run(web.stop())


def test_a_member_without_metrics_is_no_target() -> None:
    members = [("worker", "n0", "w0", "10.0.0.1:9"), ("stager", "n0", "h0", "")]
    (target,) = targets(members, job="j", scheme="https")
    assert target["targets"] == ["10.0.0.1:9"]
    assert target["labels"] == {
        "role": "worker",
        "node": "n0",
        "id": "w0",
        "job": "j",
        "__scheme__": "https",
    }


def test_no_port_is_opened_where_none_is_wanted(config: Config, tmp_path: Path) -> None:
    closed = dataclasses.replace(
        config,
        state_dir=str(tmp_path),
        serving=dataclasses.replace(config.serving, http_port=None),
    )
    with LocalService(closed, workers=0) as service:
        service.stager_when(lambda stager: True)
        seats = service.coordinator.shared.registry.stagers.values()
        assert [seat.hello.metrics for seat in seats] == [""]


def test_of_a_service_that_is_opening_or_has_failed() -> None:
    text = coordinator_sheet({"state": "opening", "job": "j"}).text().decode()
    found = samples_of(text, "coordinator")
    assert one(found, "state", state="opening") == 1
    assert "dataservice_done_step" not in found
    status = {
        "state": "failed",
        "job": "j",
        "started_s": 5.0,
        "epoch": 2,
        "fill": 0.75,
        "session": None,
        "workers": [{"draining": True}],
        "workers_without_room": 1,
        "stagers": [],
        "target_workers": 3,
        "scaling": {"waited_share": 0.5, "busy_share": 1.0},
        "counters": {"planners_lost": 4, "plan_ms": 1500},
        "holes": 7,
        "holes_by_reason": {"not a picture": 7},
        "sample_counts": {"web": {"split": 9}},
    }
    found = samples_of(coordinator_sheet(status).text().decode(), "coordinator")
    assert one(found, "state", state="failed") == 1 and one(found, "open_ranks") == 0
    assert one(found, "start_time_seconds") == 5 and one(found, "pack_fill_ratio") == 0.75
    assert one(found, "samples_quarantined_total", reason="not a picture") == 7
    assert one(found, "holes_total") == 7
    assert one(found, "samples_changed_total", source="web", reason="split") == 9
    assert one(found, "worker_restarts_total", role="planner", cause="lost") == 4
    assert one(found, "plan_seconds_total") == 1.5
    assert one(found, "workers", state="draining") == 1 and one(found, "target_workers") == 3
