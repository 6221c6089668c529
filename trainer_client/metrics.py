"""What a stream counts, and the text file in which Prometheus can read it.

Invariants: the file is replaced as a whole, so a reader never sees half of it; a folder that cannot
be written to is an error when the stream is made, and later a warning.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dataservice.errors import ConfigError

if TYPE_CHECKING:
    from trainer_client.metrics_server import MetricsServer

LOG = logging.getLogger(__name__)

WRITE_S = 5.0
WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds by which waits are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStats:
    """Counters since the stream was opened. Held packs were asked for and not yet yielded."""

    batches: int
    waited_s: float
    """Seconds that the trainer waited for them."""
    waits: tuple[int, ...]
    """Batches by how long the trainer waited: up to each bound of WAITS_S and not the one before,
    and longer."""
    steps: int
    """Of which the last micro-batch was yielded."""
    step_waited_s: float
    """Seconds that the trainer waited in the last of them."""
    received_packs: int
    received_bytes: int
    ready_batches: int
    """That need only be taken."""
    held_packs: int
    held_bytes: int
    peak_held_packs: int
    peak_held_bytes: int
    device_bytes: int
    """Of held batches that are on the device, or on their way there."""
    peak_device_bytes: int
    prefetch_packs: int
    """The bounds on what is held, as they are now."""
    prefetch_bytes: int
    retries: int
    """Calls that failed and were made again, to the coordinator or to a worker."""
    local_packs: int
    """That came through shared memory, from workers on this host; those of `get` too."""
    relayed_packs: int
    """That a peer on this host had fetched; those of `get` too."""


class Counts:
    """Of what was yielded; for one thread, and read by others."""

    def __init__(self) -> None:
        self.batches, self.waited_s = 0, 0.0
        self.waits = [0] * (len(WAITS_S) + 1)
        self.steps, self.step_waited_s = 0, 0.0
        self._this_step_s = 0.0
        """Of the step that the last batch belongs to, up to it."""

    def note(self, waited_s: float, *, ends_step: bool) -> float:
        """A batch that was waited for; what its step was waited for up to it."""
        self.batches += 1
        self.waited_s += waited_s
        self.waits[bisect_left(WAITS_S, waited_s)] += 1
        self._this_step_s += waited_s
        so_far_s = self._this_step_s
        if ends_step:
            self.steps += 1
            self.step_waited_s, self._this_step_s = so_far_s, 0.0
        return so_far_s


_METRICS = {
    "batches": ("counter", "batches_total", "Micro-batches yielded."),
    "steps": ("counter", "steps_total", "Steps of which the last micro-batch was yielded."),
    "waited_s": ("counter", "waited_seconds_total", "Seconds that the trainer waited for them."),
    "step_waited_s": ("gauge", "step_waited_seconds", "The same, of the last step."),
    "received_packs": ("counter", "received_packs_total", "Packs fetched."),
    "received_bytes": ("counter", "received_bytes_total", "Bytes of their arrays."),
    "local_packs": ("counter", "local_packs_total", "Packs that came through shared memory."),
    "relayed_packs": ("counter", "relayed_packs_total", "Packs that a peer had fetched."),
    "retries": ("counter", "retries_total", "Calls that failed and were made again."),
    "ready_batches": ("gauge", "prefetch_depth", "Micro-batches ready to be taken."),
    "held_packs": ("gauge", "held_packs", "Packs asked for and not yet yielded."),
    "held_bytes": ("gauge", "held_bytes", "Bytes of them."),
    "device_bytes": ("gauge", "device_bytes", "Bytes of them on the device."),
    "prefetch_packs": ("gauge", "prefetch_packs", "Bound on held packs."),
    "prefetch_bytes": ("gauge", "prefetch_bytes", "Bound on held bytes."),
}
"""Field of StreamStats -> type, name behind `dataservice_client_`, help."""


def prometheus_text(stats: StreamStats, labels: Mapping[str, object]) -> str:
    """In the text exposition format; each process of a host needs labels of its own."""
    shown = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for field, (kind, name, text) in _METRICS.items():
        full = f"dataservice_client_{name}"
        lines += [
            f"# HELP {full} {text}",
            f"# TYPE {full} {kind}",
            f"{full}{{{shown}}} {getattr(stats, field)}",
        ]
    name = "dataservice_client_wait_seconds"
    lines += [
        f"# HELP {name} Seconds it waited for one of them.",
        f"# TYPE {name} histogram",
        *(
            f'{name}_bucket{{{shown},le="{bound}"}} {count}'
            for bound, count in zip((*WAITS_S, "+Inf"), accumulate(stats.waits), strict=True)
        ),
        f"{name}_sum{{{shown}}} {stats.waited_s}",
        f"{name}_count{{{shown}}} {sum(stats.waits)}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _HasStats(Protocol):
    def stats(self) -> StreamStats: ...


def served_metrics(
    stream: _HasStats, labels: Mapping[str, object], *, host: str, port: int
) -> MetricsServer:
    """Ends with `stream` at the latest."""
    from trainer_client.metrics_server import MetricsServer  # a tenth of what trainers import

    known = weakref.ref(stream)

    def text() -> str:
        stream = known()
        return "" if stream is None else prometheus_text(stream.stats(), labels)

    server = MetricsServer(text, host=host, port=port)
    weakref.finalize(stream, server.close)
    return server


class MetricsFile:
    """For one thread."""

    def __init__(self, path: str | os.PathLike[str], labels: Mapping[str, object]) -> None:
        self.path, self._labels = Path(path), labels
        folder = self.path.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f'metrics_file is "{path}": {folder} is no folder that can be written to; make it, '
                "or give another"
            )
        if self.path.is_dir():
            raise ConfigError(f'metrics_file is "{path}", which is a folder; give a file in it')
        self._written_at = -WRITE_S

    def is_due(self) -> bool:
        return time.monotonic() - self._written_at >= WRITE_S

    def write(self, stats: StreamStats) -> None:
        self._written_at = time.monotonic()
        whole = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            whole.write_text(prometheus_text(stats, self._labels))
            whole.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                whole.unlink(missing_ok=True)
            LOG.warning("metrics_file %s cannot be written: %s", self.path, error)
