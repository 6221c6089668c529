"""The coordinator's figures for Prometheus, and where Prometheus finds those of its members.

Invariants: both are made from the status alone and from who is registered, so they cost what a
status costs, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from dataservice import __version__
from dataservice.actors.coordinator import Coordinator
from dataservice.obs.metrics import CONTENT_TYPE, Sheet
from dataservice.obs.web import Answer, Handler

STATES = ("opening", "serving", "failed")
ENDS = (
    ("worker", "lost", "workers_lost"),
    ("worker", "retired", "workers_retired"),
    ("stager", "lost", "stagers_lost"),
    ("planner", "lost", "planners_lost"),
)
"""Role, cause, and the coordinator's counter of what ended so."""
COUNTERS = {
    "sessions": "sessions_total",
    "steps_planned": "steps_planned_total",
    "steps_skipped": "steps_skipped_total",
    "samples_excluded": "samples_excluded_total",
    "packs_moved": "packs_placed_elsewhere_total",
    "moved_bytes": "moved_bytes_total",
    "packs_failed": "packs_failed_total",
    "packs_rebuilt": "packs_rebuilt_total",
    "packs_shared": "packs_shared_total",
    "packs_suspected": "packs_suspected_total",
    "packs_condemned": "packs_condemned_total",
    "lanes_moved": "lanes_moved_total",
    "workers_scaled": "scalings_total",
    "blocks_counted": "blocks_counted_total",
}
"""Counter of the coordinator -> metric."""


def metrics_routes(coordinator: Coordinator) -> dict[str, Handler]:
    """/metrics, and /sd for Prometheus' HTTP service discovery."""
    shared = coordinator.shared

    async def metrics(_query: Mapping[str, str]) -> Answer:
        status = coordinator.status()
        # of four thousand ranks it takes a tenth of a second, which calls need not wait for
        text = await asyncio.to_thread(lambda: coordinator_sheet(status).text())
        return Answer(text, CONTENT_TYPE)

    async def discovery(_query: Mapping[str, str]) -> Answer:
        scheme = "http" if shared.config.serving.tls is None else "https"
        registry = shared.registry
        members = [
            *(
                ("worker", seat.hello.node, seat.hello.worker_id, seat.hello.metrics)
                for _, seat in sorted(registry.workers.items())
            ),
            *(
                ("stager", seat.hello.node, seat.hello.host, seat.hello.metrics)
                for _, seat in sorted(registry.stagers.items())
            ),
        ]
        return Answer(json.dumps(targets(members, job=shared.config.job, scheme=scheme)).encode())

    return {"/metrics": metrics, "/sd": discovery}


def targets(
    members: Iterable[tuple[str, str, str, str]], *, job: str, scheme: str
) -> list[dict[str, Any]]:
    """`members`: role, node, id and "host:port" of each; those without metrics are left out."""
    return [
        {
            "targets": [where],
            "labels": {
                "role": role,
                "node": node,
                "id": member_id,
                "job": job,
                "__scheme__": scheme,
            },
        }
        for role, node, member_id, where in members
        if where
    ]


def coordinator_sheet(status: Mapping[str, Any]) -> Sheet:
    """Of a status as the coordinator answers it."""
    sheet = Sheet("coordinator", job=status["job"])
    sheet.put("build_info", 1, version=status.get("version", __version__), role="coordinator")
    if "started_s" in status:
        sheet.put("start_time_seconds", status["started_s"])
    for state in STATES:
        sheet.put("state", float(status["state"] == state), state=state)
    if status["state"] == "opening":
        return sheet
    sheet.put("epoch", status["epoch"])
    if status.get("fill") is not None:
        sheet.put("pack_fill_ratio", status["fill"])
    _put_session(sheet, status["session"])
    _put_fleet(sheet, status)
    counters = status["counters"]
    for counter, name in COUNTERS.items():
        sheet.put(name, counters.get(counter, 0))
    sheet.put("plan_seconds_total", counters.get("plan_ms", 0) / 1000)
    for role, cause, counter in ENDS:
        sheet.put("worker_restarts_total", counters.get(counter, 0), role=role, cause=cause)
    sheet.put("holes_total", status["holes"])
    for reason, count in status.get("holes_by_reason", {}).items():
        sheet.put("samples_quarantined_total", count, reason=reason)
    for source, reasons in status["sample_counts"].items():
        for reason, count in reasons.items():
            sheet.put("samples_changed_total", count, source=source, reason=reason)
    return sheet


def _put_session(sheet: Sheet, session: Mapping[str, Any] | None) -> None:
    sheet.put("session", 0 if session is None else session["generation"])
    if session is None:
        sheet.put("open_ranks", 0)
        return
    sheet.put("open_ranks", session["closed"].count(False))
    sheet.put("done_step", session["done_step"])
    sheet.put("planned_step", session["next_step"])
    for rank in range(session["dp_size"]):
        sheet.put("stream_step", session["done"][rank][0], dp_rank=str(rank))
        sheet.put("rank_waited_seconds_total", session["waited_s"][rank], dp_rank=str(rank))
        sheet.put("rank_silent_seconds", session["heard_s_ago"][rank], dp_rank=str(rank))
    bound = session["lockstep_bound"]
    if bound:
        sheet.put("plan_imbalance_ratio", session["lockstep_cost"] / bound)
        sheet.put("arrival_imbalance_ratio", session["lockstep_arrival"] / bound)


def _put_fleet(sheet: Sheet, status: Mapping[str, Any]) -> None:
    workers = status["workers"]
    draining = sum(worker["draining"] for worker in workers)
    sheet.put("workers", len(workers) - draining, state="usable")
    sheet.put("workers", draining, state="draining")
    sheet.put("workers_without_room", status["workers_without_room"])
    sheet.put("stagers", len(status["stagers"]))
    sheet.put("target_workers", status["target_workers"])
    sheet.put("waited_workers_ratio", status["scaling"]["waited_share"])
    sheet.put("workers_busy_ratio", status["scaling"]["busy_share"])
