"""Every metric of the project, and the text in which Prometheus reads those of one process.

Invariants: what is not in METRICS cannot be exposed, nor by another role, nor with other labels; a
label has as many values as there are ranks, sources or kinds of something, never as there are
samples, packs or shards; names carry base units, and counters end in `_total`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

__all__ = ["CLIENT", "COMMON", "CONTENT_TYPE", "METRICS", "MetricSpec", "Role", "Sheet"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dataservice_"
COMMON = ("job",)
"""Labels of every metric; those of a client have dp_rank and peer besides."""
CLIENT = ("job", "dp_rank", "peer")

Role = Literal["coordinator", "worker", "stager", "client"]
_COORDINATOR: tuple[Role, ...] = ("coordinator",)
_WORKER: tuple[Role, ...] = ("worker",)
_STAGER: tuple[Role, ...] = ("stager",)
_CLIENT: tuple[Role, ...] = ("client",)
_SERVICE: tuple[Role, ...] = ("coordinator", "worker", "stager")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    name: str
    """As rules and dashboards use it; a histogram's has _bucket, _sum and _count behind it."""
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    unit: str
    """Of its value; "" for a number of things."""
    labels: tuple[str, ...]
    """Besides the common ones."""
    roles: tuple[Role, ...]
    """Whose processes have it."""


def _spec(
    kind: Literal["counter", "gauge", "histogram"],
    roles: tuple[Role, ...],
    name: str,
    text: str,
    *labels: str,
) -> MetricSpec:
    bare = name.removesuffix("_total").removesuffix("_created")
    unit = next((u for u in ("seconds", "bytes", "ratio") if bare.endswith(u)), "")
    return MetricSpec(
        name=PREFIX + name, kind=kind, text=text, unit=unit, labels=labels, roles=roles
    )


_TABLE = (
    # ---- of every process of the service
    _spec("gauge", _SERVICE, "build_info", "1; which version of what this is.", "version", "role"),
    _spec("gauge", _SERVICE, "start_time_seconds", "Unix time of its start."),
    # ---- the coordinator: is any rank waiting, and for whom
    _spec("gauge", _COORDINATOR, "state", "1 for what the service is now.", "state"),
    _spec("gauge", _COORDINATOR, "epoch", "Starts of the coordinator with this state_dir."),
    _spec("gauge", _COORDINATOR, "session", "Number of the session that is open; 0: none."),
    _spec("gauge", _COORDINATOR, "open_ranks", "Ranks that have not closed their stream."),
    _spec("gauge", _COORDINATOR, "done_step", "Every rank was given all steps before it."),
    _spec("gauge", _COORDINATOR, "planned_step", "All steps before it are planned."),
    _spec("gauge", _COORDINATOR, "stream_step", "Step that the rank is in.", "dp_rank"),
    _spec(
        "counter",
        _COORDINATOR,
        "rank_waited_seconds_total",
        "Time that the rank waited for batches in this session.",
        "dp_rank",
    ),
    _spec(
        "gauge",
        _COORDINATOR,
        "rank_silent_seconds",
        "Time since the rank was last heard.",
        "dp_rank",
    ),
    _spec(
        "gauge",
        _COORDINATOR,
        "waited_workers_ratio",
        "Share of its time that the rank that waited longest waited for workers.",
    ),
    # ---- balance
    _spec(
        "gauge",
        _COORDINATOR,
        "plan_imbalance_ratio",
        "Cost of the steps handed out now over their lower bound; 1: nobody waits.",
    ),
    _spec(
        "gauge",
        _COORDINATOR,
        "arrival_imbalance_ratio",
        "The same, had their packs been placed as they came.",
    ),
    _spec("gauge", _COORDINATOR, "pack_fill_ratio", "Mean fill of packs handed out lately."),
    # ---- fleet and failures
    _spec("gauge", _COORDINATOR, "workers", "Workers that are alive.", "state"),
    _spec("gauge", _COORDINATOR, "target_workers", "Workers that are wanted."),
    _spec("gauge", _COORDINATOR, "workers_without_room", "Workers that Ray finds no node for."),
    _spec("gauge", _COORDINATOR, "workers_busy_ratio", "Share of their threads that build."),
    _spec("gauge", _COORDINATOR, "stagers", "Stagers that are alive."),
    _spec(
        "counter",
        _COORDINATOR,
        "worker_restarts_total",
        "Processes that ended and were replaced.",
        "role",
        "cause",
    ),
    _spec("counter", _COORDINATOR, "holes_total", "Holes of the job."),
    _spec(
        "counter",
        _COORDINATOR,
        "samples_quarantined_total",
        "The same, by kind of reason.",
        "reason",
    ),
    _spec(
        "counter",
        _COORDINATOR,
        "samples_changed_total",
        "Samples not packed as they are, of windows planned since this start.",
        "source",
        "reason",
    ),
    _spec("counter", _COORDINATOR, "samples_excluded_total", "Samples left out on purpose."),
    _spec("counter", _COORDINATOR, "sessions_total", "Sessions opened."),
    _spec("counter", _COORDINATOR, "steps_planned_total", "Steps planned."),
    _spec("counter", _COORDINATOR, "steps_skipped_total", "Steps without any sample that is left."),
    _spec("counter", _COORDINATOR, "plan_seconds_total", "Time spent planning steps."),
    _spec("counter", _COORDINATOR, "packs_placed_elsewhere_total", "Packs that pass 2 moved."),
    _spec(
        "counter",
        _COORDINATOR,
        "moved_bytes_total",
        "Bytes of packs placed on ranks of other nodes than their home.",
    ),
    _spec("counter", _COORDINATOR, "packs_failed_total", "Builds that failed; tried again."),
    _spec("counter", _COORDINATOR, "packs_rebuilt_total", "Packs moved from workers that ended."),
    _spec("counter", _COORDINATOR, "packs_shared_total", "Packs given back for others to build."),
    _spec(
        "counter",
        _COORDINATOR,
        "packs_suspected_total",
        "Packs built isolated for a lost worker.",
    ),
    _spec("counter", _COORDINATOR, "packs_condemned_total", "Packs that ended workers."),
    _spec("counter", _COORDINATOR, "lanes_moved_total", "Lanes that moved to another node."),
    _spec("counter", _COORDINATOR, "scalings_total", "Changes of the number of workers wanted."),
    _spec("counter", _COORDINATOR, "blocks_counted_total", "Blocks of a lazy index counted."),
    # ---- a worker: throughput and decode
    _spec("counter", _WORKER, "packs_total", "Packs that clients have all of."),
    _spec("counter", _WORKER, "served_bytes_total", "Bytes of their arrays."),
    _spec("counter", _WORKER, "packs_built_total", "Packs built."),
    _spec("counter", _WORKER, "images_total", "Images in them."),
    _spec("gauge", _WORKER, "ready_packs", "Packs held ready."),
    _spec("gauge", _WORKER, "ready_bytes", "Bytes held ready, those kept for retries too."),
    _spec("gauge", _WORKER, "ready_bound_bytes", "Bound of them, workers.ready_bytes."),
    _spec("gauge", _WORKER, "queued_packs", "Packs waiting or under build."),
    _spec("gauge", _WORKER, "rpc_inflight_bytes", "Bytes of packs on their way over gRPC."),
    _spec("counter", _WORKER, "build_seconds_total", "Time packs were under build, together."),
    _spec(
        "histogram",
        _WORKER,
        "decode_seconds",
        "Time to decode a picture, in a thread or (isolated) in a process of its own.",
        "kind",
    ),
    _spec("gauge", _WORKER, "decode_threads", "Threads that decode pictures."),
    _spec("gauge", _WORKER, "stuck_threads", "Threads past their deadline.", "kind"),
    _spec("gauge", _WORKER, "memory_bytes", "Resident memory, without pages of files."),
    _spec("counter", _WORKER, "storage_retries_total", "Reads that failed and were tried again."),
    _spec("counter", _WORKER, "storage_stalls_total", "Builds that failed at a read's deadline."),
    # ---- staging
    _spec(
        "counter",
        ("worker", "stager"),
        "staging_bytes_total",
        "Bytes of shards: copied to the cache, read from it (staged), or read past it (origin).",
        "tier",
    ),
    _spec("counter", _STAGER, "staging_shards_total", "Shards copied."),
    _spec("gauge", _STAGER, "staging_inflight", "Copies in progress."),
    _spec("gauge", _STAGER, "staging_missing_bytes", "Needed soon and still to be copied."),
    _spec(
        "gauge", _STAGER, "staging_read_through_bytes", "Needed soon, without room in the cache."
    ),
    _spec("counter", _STAGER, "staging_errors_total", "Copies that failed."),
    _spec("counter", _STAGER, "staging_stalls_total", "Reads given up at their deadline."),
    _spec("counter", _STAGER, "staging_disk_full_total", "Times the disk had too little room."),
    _spec("gauge", _STAGER, "cache_bytes", "In the cache, copies in progress included."),
    _spec("gauge", _STAGER, "cache_budget_bytes", "Bound of it, staging.budget_bytes."),
    _spec("gauge", _STAGER, "cache_shards", "Whole shards in the cache."),
    _spec("counter", _STAGER, "cache_evictions_total", "Shards dropped for others."),
    # ---- a client; trainer_client.metrics writes them, without this module
    _spec("counter", _CLIENT, "client_batches_total", "Micro-batches yielded."),
    _spec(
        "counter", _CLIENT, "client_steps_total", "Steps of which the last micro-batch was yielded."
    ),
    _spec(
        "counter",
        _CLIENT,
        "client_waited_seconds_total",
        "Seconds that the trainer waited for them.",
    ),
    _spec("histogram", _CLIENT, "client_wait_seconds", "Seconds it waited for one of them."),
    _spec("gauge", _CLIENT, "client_step_waited_seconds", "The same, of the last step."),
    _spec("counter", _CLIENT, "client_received_packs_total", "Packs fetched."),
    _spec("counter", _CLIENT, "client_received_bytes_total", "Bytes of their arrays."),
    _spec("counter", _CLIENT, "client_local_packs_total", "Packs that came through shared memory."),
    _spec("counter", _CLIENT, "client_relayed_packs_total", "Packs that a peer had fetched."),
    _spec("counter", _CLIENT, "client_retries_total", "Calls that failed and were made again."),
    _spec("gauge", _CLIENT, "client_prefetch_depth", "Micro-batches ready to be taken."),
    _spec("gauge", _CLIENT, "client_held_packs", "Packs asked for and not yet yielded."),
    _spec("gauge", _CLIENT, "client_held_bytes", "Bytes of them."),
    _spec("gauge", _CLIENT, "client_device_bytes", "Bytes of them on the device."),
    _spec("gauge", _CLIENT, "client_prefetch_packs", "Bound on held packs."),
    _spec("gauge", _CLIENT, "client_prefetch_bytes", "Bound on held bytes."),
)

METRICS: dict[str, MetricSpec] = {spec.name: spec for spec in _TABLE}
"""By name."""


class Sheet:
    """Figures of one process at one time."""

    def __init__(self, role: Role, *, job: str) -> None:
        self.role = role
        self._job = job
        self._families: dict[str, Metric] = {}

    def put(self, name: str, value: float, **labels: str) -> None:
        """`name` without the prefix. Raises ValueError for what the table does not have."""
        family = self._family(name, labels)
        values = [self._job, *(labels[label] for label in METRICS[PREFIX + name].labels)]
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(values, value)

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str
    ) -> None:
        """`counts` of what is up to each of `bounds`, not of what is up to the one before, and of
        what is above them all; `total`: the sum of the values."""
        family = self._family(name, labels)
        assert isinstance(family, HistogramMetricFamily)
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            so_far = buckets[-1][1] if buckets else 0
            buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far + count))
        values = [self._job, *(labels[label] for label in METRICS[PREFIX + name].labels)]
        family.add_metric(values, buckets, total)

    def families(self) -> Iterator[Metric]:
        """In the order of the table."""
        return (self._families[name] for name in METRICS if name in self._families)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Families(self))
        return generate_latest(registry)

    def _family(self, name: str, labels: dict[str, str]) -> Metric:
        spec = METRICS.get(PREFIX + name)
        if spec is None or self.role not in spec.roles or set(labels) != set(spec.labels):
            raise ValueError(f"{name} with labels {sorted(labels)} is no metric of a {self.role}")
        if spec.name not in self._families:
            kinds = {
                "counter": CounterMetricFamily,
                "gauge": GaugeMetricFamily,
                "histogram": HistogramMetricFamily,
            }
            names = (*COMMON, *spec.labels)
            self._families[spec.name] = kinds[spec.kind](spec.name, spec.text, labels=names)
        return self._families[spec.name]


class _Families(Collector):
    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet

    def collect(self) -> Iterator[Metric]:
        return self._sheet.families()
