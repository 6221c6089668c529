"""The dashboard and the rules for Prometheus: they parse, and use metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataservice.obs.metrics import CLIENT, COMMON, METRICS, MetricSpec, Sheet
from trainer_client.metrics import WAITS_S, StreamStats, prometheus_text

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dataservice.json"
PROMETHEUS = DEPLOY / "prometheus"
ROWS = ["Trainer stalls", "Throughput", "Staging", "Decode", "Balance", "Failures"]
TARGET_LABELS = {"instance", "role", "node", "id"}
"""That Prometheus adds to what it scrapes."""
UNUSED = {
    "dataservice_client_held_packs",
    "dataservice_client_prefetch_packs",
    "dataservice_client_waited_seconds_total",
    "dataservice_session",
}
"""Metrics that no panel shows, on purpose."""
OWN = re.compile(r"(?<![a-zA-Z_:])dataservice_[a-z0-9_]+")
SELECTOR = re.compile(r"(?<![a-zA-Z_:])(dataservice_[a-z0-9_]+)\{([^}]*)\}")


def spec_of(series: str) -> MetricSpec:
    """Of a series' name, which of a histogram has a suffix."""
    if series in METRICS:
        return METRICS[series]
    bare = re.sub(r"_(bucket|sum|count)$", "", series)
    assert METRICS[bare].kind == "histogram", series
    return METRICS[bare]


def check_expression(expression: str) -> set[str]:
    """The metrics that it uses; asserts that they are there, with the labels it selects by."""
    used = set()
    for series in OWN.findall(expression):
        used.add(spec_of(series).name)
    for series, selected in SELECTOR.findall(expression):
        spec = spec_of(series)
        common = CLIENT if "client" in spec.roles else COMMON
        names = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selected))
        assert names <= {*common, *spec.labels, *TARGET_LABELS}, (series, selected)
    for call in re.findall(r"\b(?:rate|increase)\((dataservice_[a-z0-9_]+)", expression):
        assert spec_of(call).kind in ("counter", "histogram"), call
    return used


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def test_the_dashboard_uses_metrics_that_there_are() -> None:
    used: set[str] = set()
    for expression in expressions():
        found = check_expression(expression)
        assert found and "$job" in expression, expression
        used |= found
    assert set(METRICS) - used == UNUSED


def test_the_dashboard_can_be_imported_anywhere() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] == "dataservice-overview" and "id" not in dashboard
    assert dashboard["tags"] == ["dataservice"]
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"].endswith("."), panel["id"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) and all(t["legendFormat"] for t in panel["targets"])


def test_no_panel_lies_on_another() -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_rules_use_metrics_that_there_are() -> None:
    records = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        expression = rule["expr"]
        found = check_expression(expression)
        assert found or any(name in expression for name in records), expression
        text = " ".join(rule.get("annotations", {}).values())
        # what a person is told to look at is there, too
        for name in OWN.findall(text):
            assert spec_of(name)
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_every_alert_is_tried() -> None:
    """Once when it is to be quiet and once when it fires."""
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    tried = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in tried if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in tried if not case.get("exp_alerts")}
    assert fires == quiet == {rule["alert"] for rule in rules() if "alert" in rule}


# ---- by Prometheus' own tool --------------------------------------------------------------------


def promtool(*arguments: str, text: str | None = None) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    done = subprocess.run(
        [program, *arguments],
        input=text,
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_rules_and_they_do_as_their_tests_say() -> None:
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_promtool_takes_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    filled = [e.replace("$__rate_interval", "5m").replace("$job", "vlm") for e in expressions()]
    group = [{"record": f"panel:{i}", "expr": text} for i, text in enumerate(filled)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": group}]}))
    assert f"{len(filled)} rules found" in promtool("check", "rules", str(path))


def test_promtool_finds_nothing_wrong_with_the_texts() -> None:
    """With each metric of the table in it."""
    for role in ("coordinator", "worker", "stager"):
        sheet = Sheet(role, job="vlm")
        for spec in METRICS.values():
            if role not in spec.roles:
                continue
            name = spec.name.removeprefix("dataservice_")
            labels = dict.fromkeys(spec.labels, "x")
            if spec.kind == "histogram":
                sheet.put_histogram(name, (0.5,), (1, 2), 3.0, **labels)
            else:
                sheet.put(name, 1, **labels)
        assert promtool("check", "metrics", text=sheet.text().decode()) == ""
    figures: dict[str, Any] = dict.fromkeys(StreamStats.__dataclass_fields__, 1)
    stats = StreamStats(**figures | {"waits": (1,) * (len(WAITS_S) + 1)})
    labels = {"job": "vlm", "dp_rank": 0, "peer": 0}
    assert promtool("check", "metrics", text=prometheus_text(stats, labels)) == ""
