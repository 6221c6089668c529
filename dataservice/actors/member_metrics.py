"""The metrics of a worker or stager: their figures, and the HTTP server that answers them.

Invariants: a member without its metrics does its work all the same; nothing here is imported
before a member wants it, for it takes a tenth of a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dataservice import __version__
from dataservice.actors.building import Builders
from dataservice.actors.worker_memory import resident_bytes
from dataservice.actors.worker_tools import WorkerTools
from dataservice.errors import ConfigError
from dataservice.obs.metrics import CONTENT_TYPE, Role, Sheet
from dataservice.obs.web import Answer, WebServer, start_web
from dataservice.pipeline.pool import TOOK_S
from dataservice.rpc.security import ServerSecurity
from dataservice.storage.staging import StagingArea

_LOG = logging.getLogger(__name__)


class MemberMetrics:
    """Made by `start_metrics`."""

    def __init__(self, server: WebServer | None, address: str) -> None:
        self._server = server
        self.address = address
        """ "host:port" for Prometheus; "" without a server."""

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is not None:
            await self._server.stop()


async def start_metrics(
    sheet: Callable[[], Sheet], *, host: str, advertise: str | None, security: ServerSecurity
) -> MemberMetrics:
    """Answers /metrics with `sheet()` on any free port of `host`, known to others as `advertise`.

    A host that it may not be served at is a warning."""

    async def metrics(_query: Mapping[str, str]) -> Answer:
        return Answer(sheet().text(), CONTENT_TYPE)

    try:
        server = await start_web({"/metrics": metrics}, host=host, port=0, security=security)
    except ConfigError as error:
        _LOG.warning("no metrics here: %s", error)
        return MemberMetrics(None, "")
    shown = advertise or host
    shown = f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown
    return MemberMetrics(server, f"{shown}:{server.port}")


def member_sheet(role: Role, *, job: str, started_s: float) -> Sheet:
    """What every member has to tell. `started_s`: unix time."""
    sheet = Sheet(role, job=job)
    sheet.put("build_info", 1, version=__version__, role=role)
    sheet.put("start_time_seconds", started_s)
    return sheet


def worker_sheet(
    tools: WorkerTools | None,
    builders: Builders | None,
    *,
    started_s: float,
    served_packs: int,
    served_bytes: int,
    sending_bytes: int,
) -> Sheet:
    """`tools` and `builders`: None of one that has not joined yet; `sending_bytes`: of packs on
    their way over gRPC."""
    job = "" if tools is None else tools.config.job
    sheet = member_sheet("worker", job=job, started_s=started_s)
    if tools is None or builders is None:
        return sheet
    ready_bytes, ready_packs, queued = tools.queue.figures()
    reader = tools.reader
    for name, value in {
        "packs_total": served_packs,
        "served_bytes_total": served_bytes,
        "packs_built_total": builders.built,
        "images_total": builders.images,
        "ready_packs": ready_packs,
        "ready_bytes": ready_bytes,
        "ready_bound_bytes": tools.config.workers.ready_bytes,
        "queued_packs": queued,
        "rpc_inflight_bytes": sending_bytes,
        "build_seconds_total": tools.queue.busy_s(),
        "decode_threads": tools.decode_threads,
        "memory_bytes": resident_bytes(),
        "storage_retries_total": reader.retries,
        "storage_stalls_total": builders.stalls,
    }.items():
        sheet.put(name, value)
    sheet.put("staging_bytes_total", reader.staged_bytes, tier="staged")
    sheet.put("staging_bytes_total", reader.origin_bytes, tier="origin")
    sheet.put("stuck_threads", reader.stuck_reads, kind="read")
    sheet.put("stuck_threads", tools.stuck_decodes, kind="decode")
    for kind, pool in tools.decode_pools.items():
        sheet.put_histogram("decode_seconds", TOOK_S, pool.took, pool.busy_s, kind=kind)
    return sheet


def put_stager(sheet: Sheet, area: StagingArea) -> None:
    figures = area.figures()
    for name, value in {
        "staging_shards_total": figures.copied_shards,
        "staging_inflight": area.inflight,
        "staging_missing_bytes": figures.missing_bytes,
        "staging_read_through_bytes": figures.read_through_bytes,
        "staging_errors_total": figures.errors,
        "staging_stalls_total": figures.stalls,
        "staging_disk_full_total": figures.disk_full,
        "cache_bytes": figures.cached_bytes,
        "cache_budget_bytes": area.budget_bytes,
        "cache_shards": figures.cached_shards,
        "cache_evictions_total": figures.evictions,
    }.items():
        sheet.put(name, value)
    sheet.put("staging_bytes_total", figures.copied_bytes, tier="copied")
