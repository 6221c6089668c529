"""What the coordinator takes at scale: the real one, its planning process, gRPC server and journal,
with simulated trainer ranks and workers, which hold no pixels.

    python benchmarks/scale.py [--rows 64x16 1024x16 ...] [--steps N] [--step-s S] [--workers N]

A row is DP size x micro-steps. Each rank and each worker has a connection of its own and asks what
a real one asks, when it asks it. A step is taken to last as long as its tokens take: 8,192 a
micro-batch at 10,000 a second and rank. Limits: less than 5 s of the coordinator's CPU time a step
and 4 GiB; at 1024x16, 99 of 100 calls answered within 50 ms while steps are planned.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, machine, show, show_reached
from measuring import cpu_seconds, peak_bytes
from reports import aligned
from scale_data import PACK_LENGTH, planted_config

HERE = Path(__file__).resolve().parent
ROWS = ("64x16", "256x16", "256x128", "1024x16", "1024x128", "4096x16")
LIMITED = "1024x16"
MAX_CPU_S, MAX_BYTES, MAX_P99_S = 5.0, 4 << 30, 0.050
TOKENS_S = 10_000
RANKS_A_PROCESS = 1024
WORKERS_A_NODE = 4
PROBE_GAP_S = 0.05
START_S = 600.0
LIBRARIES = ("grpcio", "msgpack", "msgspec", "zstandard", "numpy", "numba")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Child:
    """A process of the benchmark; says and answers lines of JSON."""

    def __init__(self, script: str, *arguments: str) -> None:
        environment = os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self, timeout_s: float = START_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise SystemExit(f"process {self.pid} said nothing for {timeout_s:g} s")
            got = os.read(fd, 1 << 20)
            if not got:
                raise SystemExit(f"process {self.pid} has ended")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def asked(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.said(120)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def children() -> Iterator[list[Child]]:
    """Ended in the order of the list."""
    running: list[Child] = []
    try:
        yield running
    finally:
        for child in running:
            child.close()


class Row:
    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.dp_size, self.micro_steps = map(int, name.split("x"))
        self.step_s: float = options.step_s or self.micro_steps * PACK_LENGTH / TOKENS_S
        self.steps: int = options.steps
        self.workers: int = options.workers
        self.slowest: int = options.slowest
        self.figures: dict[str, Any] = {}

    def run(self, config_path: Path) -> None:
        with children() as running:
            coordinator = Child("scale_coordinator.py", str(config_path), str(self.slowest))
            running.append(coordinator)
            hello = coordinator.said()
            common = {
                "endpoint": hello["endpoint"],
                "job": "scale",
                "dp_size": self.dp_size,
                "micro_steps": self.micro_steps,
                "step_s": self.step_s,
                "nodes": max(1, self.workers // WORKERS_A_NODE),
                "gap_s": PROBE_GAP_S,
            }
            clients = self._clients(common)
            running[:0] = clients
            for child in clients:
                if not child.said()["begun"]:
                    raise SystemExit(f"{self.name}: {child.asked()['errors']}")
            probe = self._probe(common, coordinator)
            running.insert(0, probe)
            self._measure(coordinator, hello["planner"], clients, probe)

    def _clients(self, common: dict[str, Any]) -> list[Child]:
        kinds = [("workers", 0, self.workers)]
        for first in range(0, self.dp_size, RANKS_A_PROCESS):
            kinds.append(("ranks", first, min(self.dp_size, first + RANKS_A_PROCESS)))
        return [
            Child("scale_clients.py", json.dumps(common | {"kind": kind, "range": [first, stop]}))
            for kind, first, stop in kinds
        ]

    def _probe(self, common: dict[str, Any], coordinator: Child) -> Child:
        session = coordinator.asked()["session"]
        probe = Child(
            "scale_clients.py",
            json.dumps(common | {"kind": "probe", "range": [0, 1], "session": session}),
        )
        probe.said()
        return probe

    def _measure(
        self, coordinator: Child, planner: int, clients: list[Child], probe: Child
    ) -> None:
        self._until_done(coordinator, 1)
        before = coordinator.asked()
        for child in (*clients, probe):
            child.asked()
        cpu = [cpu_seconds(pid) for pid in (coordinator.pid, planner)]
        client_cpu = [cpu_seconds(child.pid) for child in clients]
        began = time.monotonic()
        seen = self._until_done(coordinator, before["done_step"] + self.steps)
        wall_s = time.monotonic() - began
        after = seen[-1]
        steps = after["done_step"] - before["done_step"]
        planned = after["counters"]["steps_planned"] - before["counters"]["steps_planned"]
        plan_ms = after["counters"]["plan_ms"] - before["counters"]["plan_ms"]
        used = [
            cpu_seconds(pid) - first
            for pid, first in zip((coordinator.pid, planner), cpu, strict=True)
        ]
        asked = [child.asked() for child in clients]
        errors = [text for found in asked for text in found["errors"]]
        if errors or any(found["ended"] for found in asked):
            raise SystemExit(f"{self.name}: {errors}")
        inside = [s for found in seen for one in found["calls"].values() for s in one]
        self.figures = {
            "steps": steps,
            "planned": planned,
            "wall_s": wall_s,
            "rpc_s": len(inside) / wall_s,
            "cpu_s": used[0] / steps,
            "cpu_share": used[0] / wall_s,
            "plan_cpu_s": used[1] / max(1, planned),
            "plan_s": plan_ms / 1000 / max(1, planned),
            "plan_busy": used[1] / wall_s,
            "peak": peak_bytes(coordinator.pid),
            "plan_peak": peak_bytes(planner),
            "inside": inside,
            "by_method": {
                name: [s for found in seen for s in found["calls"].get(name, ())]
                for name in {name for found in seen for name in found["calls"]}
            },
            "late": [s for found in seen for s in found["late"]],
            "held": sorted((one for found in seen for one in found["held"]), reverse=True),
            "calls": [s for found in asked for one in found["calls"].values() for s in one],
            "probe": [s for one in probe.asked()["calls"].values() for s in one],
            "client_late": [s for found in asked for s in found["late"]],
            "client_share": max(
                (cpu_seconds(child.pid) - first) / wall_s
                for child, first in zip(clients, client_cpu, strict=True)
            ),
            "refused": sum(found["refused"] for found in asked),
            "leases_lost": sum(found["leases_lost"] for found in asked),
            "waited_s": sum(found["waited_s"] for found in asked) / self.dp_size / steps,
        }

    def _until_done(self, coordinator: Child, step: int) -> list[dict[str, Any]]:
        until = time.monotonic() + START_S + (step + 1) * self.step_s
        seen = []
        while time.monotonic() < until:
            seen.append(coordinator.asked())
            if seen[-1]["done_step"] >= step:
                return seen
            time.sleep(0.25)
        raise SystemExit(f"{self.name}: step {step} was not done within {START_S:g} s")

    # ---- what it says ------------------------------------------------------------------------

    def cells(self) -> list[str]:
        found = self.figures
        return [
            self.name,
            f"{self.step_s:.1f}",
            f"{found['rpc_s']:,.0f}",
            f"{found['cpu_s']:.2f}",
            f"{100 * found['cpu_share']:.0f} %",
            f"{found['plan_cpu_s']:.2f}",
            f"{found['plan_s']:.2f}",
            f"{found['peak'] / 2**30:.2f}",
            f"{found['plan_peak'] / 2**30:.2f}",
            *_percentiles(found["inside"]),
            *_percentiles(found["probe"]),
            *_percentiles(found["calls"]),
            f"{1000 * max(found['late']):.0f}",
        ]

    def notes(self) -> list[str]:
        found = self.figures
        methods = ", ".join(
            f"{name} {len(seconds) / found['wall_s']:,.0f}/s {1e3 * np.mean(seconds):.2f} ms"
            for name, seconds in sorted(found["by_method"].items())
        )
        late = 1000 * np.percentile(found["client_late"], 99)
        held = [f"    held {1000 * s:.0f} ms: {what}" for s, what in found["held"][: self.slowest]]
        return [
            f"{self.name}: {found['steps']} steps in {found['wall_s']:.0f} s, {found['planned']} "
            f"planned meanwhile, planner busy {100 * found['plan_busy']:.0f} % of the time; "
            f"ranks waited {found['waited_s']:.2f} s a step, {found['refused']} calls refused, "
            f"{found['leases_lost']} leases lost",
            f"    inside: {methods}",
            f"    the busiest client process uses {100 * found['client_share']:.0f} % of a core, "
            f"its event loop runs {late:.1f} ms late at p99",
            *held,
        ]

    def limits(self) -> list[Figure]:
        found = self.figures
        p99 = float(np.percentile(found["probe"], 99))
        return [
            Figure(
                name=f"coordinator CPU a step, {self.name}",
                value=found["cpu_s"],
                unit="s",
                target=f"less than {MAX_CPU_S:g} s",
                reached=found["cpu_s"] < MAX_CPU_S,
            ),
            Figure(
                name=f"coordinator memory, {self.name}",
                value=found["peak"] / 2**30,
                unit="GiB",
                target="less than 4 GiB",
                reached=found["peak"] < MAX_BYTES,
            ),
            Figure(
                name=f"99th percentile of a GetSteps call with its answer, {self.name}",
                value=1000 * p99,
                unit="ms",
                target="less than 50 ms while planning",
                reached=p99 < MAX_P99_S,
                note=f"{len(found['probe'])} calls by a process that does nothing else",
            ),
        ]


def _percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    median, p99 = np.percentile(seconds, [50, 99]) * 1000
    return f"{median:.1f}", f"{p99:.1f}"


COLUMNS = (
    ("", ""),
    ("step", "s"),
    ("RPC", "/s"),
    ("coordinator", "CPU s/step"),
    ("", "core"),
    ("planner", "CPU s/step"),
    ("", "s/step"),
    ("peak", "GiB"),
    ("peak", "planner"),
    ("inside", "p50"),
    ("", "p99"),
    ("probe", "p50"),
    ("", "p99"),
    ("clients", "p50"),
    ("", "p99"),
    ("loop", "late"),
)
"""Two lines of headings."""
LEGEND = """\
inside: milliseconds of a call in the coordinator, its waits for news excluded. probe: milliseconds
of GetSteps with a step's answer, asked 20 times a second by a process of its own. clients: of all
calls that are not long polls, as the simulated ranks and workers see them, their own queues
included. loop: most milliseconds that the coordinator's event loop ran late."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="DPxGA")
    parser.add_argument("--steps", type=int, default=3, help="measured, after the first")
    parser.add_argument("--step-s", type=float, help="seconds a step, in place of the assumption")
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument(
        "--slowest", type=int, default=0, help="callbacks to name that held the event loop"
    )
    parser.add_argument("--lease-s", type=float, default=2.0)
    options = parser.parse_args(arguments)
    print(f"machine:  {machine()}")
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    print(f"versions: Python {platform.python_version()}, {versions}")
    print(f"command:  python benchmarks/scale.py {' '.join(sys.argv[1:])}".rstrip(), flush=True)
    done: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        config = planted_config(Path(name), workers=options.workers, lease_s=options.lease_s)
        for row in (Row(name, options) for name in options.rows):
            shutil.rmtree(config.state_dir, ignore_errors=True)
            row.run(Path(name) / "config.yaml")
            print("\n" + "\n".join(row.notes()), flush=True)
            done.append(row)
    print()
    for line in aligned([*zip(*COLUMNS, strict=True), *(row.cells() for row in done)]):
        print(line)
    print("\n" + LEGEND + "\n")
    every = [figure for row in done if row.name == LIMITED for figure in row.limits()]
    for figure in every:
        show(figure)
    return int(not show_reached(every)) if every else 0


if __name__ == "__main__":
    sys.exit(main())
