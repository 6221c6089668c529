"""A few figures as Ray's own metrics, which its dashboard and its Prometheus targets have.

Invariants: they say what /metrics says, up to MIRROR_S later; none has a label of which there are
as many as ranks; what goes wrong with them costs a line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ray.util.metrics import Counter, Gauge

from dataservice.obs.metrics import COMMON, METRICS, Sheet

_LOG = logging.getLogger(__name__)

MIRROR_S = 10.0
MIRRORED = (
    "dataservice_state",
    "dataservice_open_ranks",
    "dataservice_done_step",
    "dataservice_waited_workers_ratio",
    "dataservice_plan_imbalance_ratio",
    "dataservice_pack_fill_ratio",
    "dataservice_workers",
    "dataservice_target_workers",
    "dataservice_holes_total",
    "dataservice_worker_restarts_total",
    "dataservice_packs_total",
    "dataservice_served_bytes_total",
    "dataservice_images_total",
    "dataservice_ready_bytes",
    "dataservice_memory_bytes",
)
"""Ray puts `ray_` before these names."""


class RayMirror:
    def __init__(self) -> None:
        self._metrics: dict[str, Gauge | Counter] = {}
        self._counted: dict[tuple[str, ...], float] = {}

    def show(self, sheet: Sheet) -> None:
        for family in sheet.families():
            for sample in family.samples:
                if sample.name in MIRRORED:
                    self._show(sample.name, sample.value, sample.labels)

    def _show(self, name: str, value: float, labels: dict[str, str]) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            spec = METRICS[name]
            kind = Counter if spec.kind == "counter" else Gauge
            tags = (*COMMON, *spec.labels)
            metric = self._metrics[name] = kind(name, description=spec.text, tag_keys=tags)
        if isinstance(metric, Gauge):
            metric.set(value, tags=labels)
            return
        series = (name, *labels.values())
        more = value - self._counted.get(series, 0.0)
        if more > 0:
            self._counted[series] = value
            metric.inc(more, tags=labels)


async def keep_mirrored(sheet: Callable[[], Sheet]) -> None:
    """Until it is cancelled."""
    mirror = RayMirror()
    while True:
        await asyncio.sleep(MIRROR_S)  # first, for a process that starts has better to do
        try:
            mirror.show(sheet())
        except Exception as error:
            _LOG.warning("Ray's metrics lack this process's: %s: %s", type(error).__name__, error)
            return
