"""The state of the service as plain JSON types, for the command line and the tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dataservice import __version__
from dataservice.actors.registry import StagerSeat, WorkerSeat
from dataservice.actors.session import Session
from dataservice.actors.shared import Shared

_STAGER: dict[str, Any] = {
    "cached_bytes": 0,
    "cached_shards": 0,
    "copied_bytes": 0,
    "copied_shards": 0,
    "bytes_per_s": 0.0,
    "missing_bytes": 0,
    "missing_shards": 0,
    "read_through_bytes": 0,
    "read_through_shards": 0,
    "evictions": 0,
    "errors": 0,
    "stalls": 0,
    "disk_full": 0,
    "last_error": "",
}
"""What a stager tells, and what stands for it before it has."""


def status_of(shared: Shared) -> dict[str, Any]:
    """Costs some milliseconds at a thousand ranks and as many workers; whoever asks often keeps
    the answer for a while."""
    plan = shared.info
    about = {
        "job": shared.config.job,
        "version": __version__,
        "now_s": round(time.time(), 3),
        "started_s": round(shared.started_s, 3),
        "http_port": shared.http_port,
        "events": shared.events.as_json(),
    }
    if plan is None:
        return {"state": "opening", **about}
    session, ownership = shared.session, shared.log.ownership
    failed = session is not None and session.failure is not None
    seats = [seat for _, seat in sorted(shared.registry.workers.items())]
    hit_rates = _hit_rates(seats)
    return {
        "state": "failed" if failed else "serving",
        **about,
        "epoch": ownership.epoch if ownership is not None else 0,
        "plan_digest": plan.digest,
        "decoder": shared.decoder,
        "samples": plan.num_samples,
        "pack_length": plan.pack_length,
        "fill": _fill(session),
        "rates": shared.rates.as_json(shared.registry),
        "session": _session(shared, session),
        "planning_waits": shared.planning_waits,
        "workers": [_worker(seat, *shared.rates.of_worker(seat)) for seat in seats],
        "workers_without_room": shared.workers_without_room,
        "stagers": [
            _stager(seat, shared.lane_nodes, hit_rates.get(node))
            for node, seat in sorted(shared.registry.stagers.items())
        ],
        "bad_image": shared.config.errors.bad_image,
        "holes": len(shared.holes),
        "holes_by_reason": shared.holes.by_kind(),
        "hole_reasons": shared.holes.first_reasons(100),
        "worst_shards": shared.holes.worst_shards(10),
        "quarantine": str(shared.quarantine.path) if len(shared.holes) else "",
        "sample_counts": {name: dict(found) for name, found in shared.sample_counts.items()},
        "counters": dict(shared.counters),
        "counting": _counting(shared),
    }


def _counting(shared: Shared) -> dict[str, Any] | None:
    """Of a lazy index, since the service started; None with a full one."""
    if shared.config.index != "lazy":
        return None
    return {
        "blocks": shared.counters["blocks_counted"],
        "by_planner": shared.counters["blocks_counted_by_planner"],
        "records": shared.counters["records_counted"],
        "rejected": shared.counters["records_rejected"],
        "failed": shared.counters["blocks_failed"],
        "waiting_for": shared.planning_waits,
    }


def _fill(session: Session | None) -> float | None:
    """Mean of the steps that are handed out now."""
    fills = [] if session is None else [step.fill for step in session.steps.values()]
    known = [fill for fill in fills if fill is not None]
    return round(sum(known) / len(known), 6) if known else None


def _hit_rates(seats: Sequence[WorkerSeat]) -> dict[str, float]:
    """Node -> staged bytes over all that its workers read, of nodes whose workers read any."""
    read: dict[str, list[int]] = {}
    for seat in seats:
        if seat.stats is not None:
            sums = read.setdefault(seat.hello.node, [0, 0])
            sums[0] += seat.stats.read_staged_bytes
            sums[1] += seat.stats.read_origin_bytes
    return {node: a / (a + b) for node, (a, b) in read.items() if a + b}


def _session(shared: Shared, session: Session | None) -> dict[str, Any] | None:
    if session is None:
        return None
    now = time.monotonic()
    in_all, for_workers = shared.waits.lately(session.generation, session.grid.dp_size)
    planned = [step.planned for step in session.steps.values()]
    return {
        "generation": session.generation,
        "run_id": session.run_id,
        "open_for_s": round(now - session.opened, 1),
        "dp_size": session.grid.dp_size,
        "peers": session.peers,
        "micro_steps": session.grid.micro_steps,
        "packs_per_cell": session.grid.packs_per_cell,
        "done_step": session.done_step,
        "next_step": session.next_step,
        "end_step": session.end_step,
        "excluded": session.next_cursor.excluded,
        "waited_s": [round(rank.waited_s, 3) for rank in session.ranks],
        "waited_share": [round(share, 4) for share in in_all],
        "waited_workers_share": [round(share, 4) for share in for_workers],
        "done": [list(rank.done) for rank in session.ranks],
        "closed": [rank.closed for rank in session.ranks],
        "heard_s_ago": [round(now - rank.heard, 1) for rank in session.ranks],
        "lockstep_cost": sum(p.lockstep_cost for p in planned),
        "lockstep_bound": sum(p.lockstep_bound for p in planned),
        "lockstep_arrival": sum(p.lockstep_arrival for p in planned),
        "failure": str(session.failure) if session.failure is not None else "",
    }


def _worker(seat: WorkerSeat, images_per_s: float, busy_share: float) -> dict[str, Any]:
    stats = seat.stats
    return {
        "id": seat.hello.worker_id,
        "node": seat.hello.node,
        "endpoint": seat.hello.endpoint,
        "draining": seat.draining,
        "retiring": stats.retiring if stats else "",
        "ready_bytes": stats.ready_bytes if stats else 0,
        "ready_packs": stats.ready_packs if stats else 0,
        "queued_packs": stats.queued_packs if stats else 0,
        "built_packs": stats.built_packs if stats else 0,
        "served_packs": stats.served_packs if stats else 0,
        "served_bytes": stats.served_bytes if stats else 0,
        "images": stats.images if stats else 0,
        "images_per_s": round(images_per_s, 2),
        "busy_share": round(busy_share, 4),
        "decode_s": round(stats.decode_s, 3) if stats else 0.0,
        "read_origin_bytes": stats.read_origin_bytes if stats else 0,
        "read_staged_bytes": stats.read_staged_bytes if stats else 0,
        "storage_stalls": stats.storage_stalls if stats else 0,
        "storage_retries": stats.storage_retries if stats else 0,
        "stuck_reads": stats.stuck_reads if stats else 0,
        "stuck_decodes": stats.stuck_decodes if stats else 0,
        "memory_bytes": stats.memory_bytes if stats else 0,
    }


def _stager(seat: StagerSeat, lane_nodes: Sequence[str], hit_rate: float | None) -> dict[str, Any]:
    stats = seat.stats
    figures = {name: getattr(stats, name) if stats else empty for name, empty in _STAGER.items()}
    return {
        "node": seat.hello.node,
        "host": seat.hello.host,
        "cache_dir": seat.hello.cache_dir,
        "budget_bytes": seat.hello.budget_bytes,
        "lanes": [lane for lane, node in enumerate(lane_nodes) if node == seat.hello.node],
        "left_s": _left_s(figures["missing_bytes"], figures["bytes_per_s"]),
        "hit_rate": None if hit_rate is None else round(hit_rate, 4),
        **figures,
    }


def _left_s(missing_bytes: int, bytes_per_s: float) -> float | None:
    """Until nothing is missing, at the rate of lately; None while nothing is copied."""
    if not missing_bytes:
        return 0.0
    return round(missing_bytes / bytes_per_s, 1) if bytes_per_s > 0 else None
