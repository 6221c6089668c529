"""Whether what processes hold grows: memory, threads and descriptors of each, and /dev/shm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from figures import Figure

WARM_UP = 0.2
"""Share of the steps whose samples are left out."""
MOST_MB_A_1000_STEPS = 0.5
NOTE_S = 1.0
TOLD_S = 30.0


@dataclass(kw_only=True)
class Flatness:
    """Rows of (step, MB resident, threads, descriptors) by process name."""

    processes: Mapping[str, psutil.Process]
    rows: dict[str, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    shm: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, pids: Mapping[str, int]) -> Flatness:
        return cls(processes={name: psutil.Process(pid) for name, pid in pids.items()})

    def watch(self, step: Callable[[], int], running: Callable[[], bool]) -> None:
        """Notes once a second until `running` is false, and tells the step now and then."""
        told = time.monotonic()
        while running():
            self.note(step())
            if time.monotonic() - told > TOLD_S:
                print(f"at step {step()}", file=sys.stderr, flush=True)
                told = time.monotonic()
            time.sleep(NOTE_S)

    def note(self, step: int) -> None:
        for name, process in self.processes.items():
            try:
                row = (
                    process.memory_info().rss / 1e6,
                    process.num_threads(),
                    process.num_fds(),
                )
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it is about to end
            self.rows.setdefault(name, []).append((step, *row))
        files = [path.stat().st_size for path in Path("/dev/shm").glob("*") if path.is_file()]
        self.shm.append((step, sum(files) / 1e6))

    def figures(self) -> list[Figure]:
        found = []
        for name, rows in self.rows.items():
            kept = _warm(np.array(rows))
            slope = _slope(kept[:, 0], kept[:, 1])
            found.append(
                Figure(
                    name=f"memory of {name}, growth",
                    value=slope,
                    unit=f"MB a 1,000 steps ({kept[-1, 1]:,.0f} MB at the end)",
                    target=f"under {MOST_MB_A_1000_STEPS:g}",
                    reached=slope < MOST_MB_A_1000_STEPS,
                )
            )
            for column, what in ((2, "threads"), (3, "descriptors")):
                grown = _growth(kept[:, column])
                found.append(
                    Figure(
                        name=f"{what} of {name}, growth",
                        value=grown,
                        unit=f"from the second fifth to the last ({kept[-1, column]:.0f} there)",
                        target="none",
                        reached=grown <= 0,
                    )
                )
        shm = _warm(np.array(self.shm))
        slope = _slope(shm[:, 0], shm[:, 1])
        found.append(
            Figure(
                name="/dev/shm, growth",
                value=slope,
                unit=f"MB a 1,000 steps ({shm[-1, 1]:,.1f} MB at the end)",
                target="none",
                reached=slope < 1e-3,
            )
        )
        return found


def _warm(rows: np.ndarray) -> np.ndarray:
    return rows[rows[:, 0] >= WARM_UP * rows[-1, 0]]


def _slope(steps: np.ndarray, values: np.ndarray) -> float:
    if len(set(steps.tolist())) < 2:
        raise SystemExit("too few samples for a slope; take more steps")
    return float(np.polyfit(steps / 1000, values, 1)[0])


def _growth(values: np.ndarray) -> float:
    quarter = max(1, len(values) // 4)
    return float(values[-quarter:].max() - values[:quarter].max())
