"""Measures how long trainers wait for their first micro-batch, and what for.

    python benchmarks/first_batch.py [--rounds 3] [--ranks 2]

On the demo's corpus, indexed before: (1) `dataservice serve` on a Ray of its own beside ranks that
are up and ask already, (2) the same from a saved state, after the service was stopped and started
again, (3) ranks that start anew from a saved state while the service runs. Beside (1) and (2), in
the same round, a process that does nothing but start the same Ray, so that what is ours is told
from what is Ray's. Medians; exits with 1 where ours takes 10 s or more.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from figures import Figure, machine, show, show_reached
from measuring import SPAWN
from reports import aligned

from dataservice.errors import DataServiceError
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus, StatusReport
from trainer_client import PackStream, ParallelLayout

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "demo.yaml"
JOB = "demo"
MICRO_STEPS = 4
STEPS = 3
"""That ranks read before they save."""
LIMIT_S = 120.0
POLL_S = 0.02
TARGET_S = 10.0
RAY_ALONE = """
import time
from dataservice.actors.ray_local import joined_ray
with joined_ray(None, resource="data_node", num_cpus=65):
    print(time.monotonic(), flush=True)
"""
MILESTONES = (
    ("coordinator answers", lambda status: bool(status)),
    ("plan is open", lambda status: status["state"] != "opening"),
    ("all ranks have come", lambda status: status.get("session") is not None),
    ("first worker", lambda status: bool(status.get("workers"))),
    ("first step planned", lambda status: status["counters"].get("steps_planned", 0) > 0),
    ("first pack built", lambda status: any(w["built_packs"] for w in status["workers"])),
)


def rank_main(
    link: Any, rank: int, ranks: int, endpoint: str, state: dict[str, Any] | None
) -> None:
    """Says "up"; asks from when it is told to; sends when its first batch came, and its state."""
    link.send("up")
    run_id = link.recv()
    with PackStream(
        endpoint,
        job=JOB,
        layout=ParallelLayout.data_parallel(rank, ranks),
        micro_steps=MICRO_STEPS,
        run_id=run_id,
        timeout_s=LIMIT_S,
    ) as stream:
        if state is not None:
            stream.load_state_dict(state)
        next(stream)
        link.send(time.monotonic())
        for _ in range(STEPS * MICRO_STEPS - 1):
            next(stream)
        link.send(stream.state_dict())
        link.recv()


class Trainer:
    """All ranks of a run, imported and ready to ask."""

    def __init__(self, endpoint: str, ranks: int, states: list[Any]) -> None:
        self._links = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(
                target=rank_main, args=(theirs, rank, ranks, endpoint, states[rank])
            )
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self._all()

    def _all(self) -> list[Any]:
        for rank, link in enumerate(self._links):
            if not link.poll(LIMIT_S):
                raise SystemExit(f"rank {rank} said nothing for {LIMIT_S:g} s")
        return [link.recv() for link in self._links]

    def ask(self) -> None:
        run_id = os.urandom(8).hex()
        for link in self._links:
            link.send(run_id)

    def first_batch(self) -> float:
        """Monotonic time at which the last rank had its first one."""
        return float(max(self._all()))

    def end(self) -> list[Any]:
        """Their states."""
        states = self._all()
        for link in self._links:
            link.send("end")
        self.close()
        return states

    def close(self) -> None:
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


@contextmanager
def trainer(endpoint: str, ranks: int, states: list[Any]) -> Iterator[Trainer]:
    ready = Trainer(endpoint, ranks, states)
    try:
        yield ready
    finally:
        ready.close()


@contextmanager
def served(port: int, log: Path) -> Iterator[None]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataservice.cli", "serve", str(CONFIG), "--port", str(port)],
            stdout=out,
            stderr=out,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def milestones(endpoint: str, began: float) -> dict[str, float]:
    """Seconds from `began` at which each was seen."""
    seen: dict[str, float] = {}
    with CoordinatorClient(endpoint) as client:
        while len(seen) < len(MILESTONES):
            if time.monotonic() - began > LIMIT_S:
                raise SystemExit(f"after {LIMIT_S:g} s only {', '.join(seen) or 'nothing'}")
            with suppress(DataServiceError):
                report: StatusReport = client.call(GetStatus(), 1.0)
                status = orjson.loads(report.status)
                for name, reached in MILESTONES[len(seen) :]:
                    if not reached(status):
                        break
                    seen[name] = time.monotonic() - began
            time.sleep(POLL_S)
    return seen


def ray_alone() -> float:
    """Seconds from the start of a process to its Ray being up."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RAY_ALONE],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
    )
    return float(done.stdout.split()[-1]) - began


def one_start(
    folder: Path, ranks: int, states: list[Any], *, restart: bool
) -> tuple[dict[str, float], float, list[Any]]:
    """Milestones of a start of the service up to the first batch; with `restart`, seconds to the
    first batch of ranks that start anew beside it; states."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    again_s = 0.0
    with trainer(endpoint, ranks, states) as waiting:
        began = time.monotonic()
        with served(port, folder / "serve.log"):
            waiting.ask()
            seen = milestones(endpoint, began)
            seen["first batch at every rank"] = waiting.first_batch() - began
            states = waiting.end()
            if restart:
                with trainer(endpoint, ranks, states) as anew:
                    began = time.monotonic()
                    anew.ask()
                    again_s = anew.first_batch() - began
                    anew.end()
    return seen, again_s, states


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{machine()}\nPython {sys.version.split()[0]}; {' '.join(sys.argv)}\n")
    rays, fresh, resumed, beside = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="first-batch-") as name:
        os.environ["DEMO_DIR"] = name
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "dataservice.cli", "index", str(CONFIG)],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        for number in range(options.rounds):
            rays.append(ray_alone())
            seen, _, states = one_start(
                folder, options.ranks, [None] * options.ranks, restart=False
            )
            fresh.append(seen)
            seen, again_s, _ = one_start(folder, options.ranks, states, restart=True)
            resumed.append(seen)
            beside.append(again_s)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    ray_s = statistics.median(rays)
    names = list(fresh[0])
    middle = {
        kind: [statistics.median(seen[name] for seen in rounds) for name in names]
        for kind, rounds in (("start", fresh), ("resume", resumed))
    }
    rows = [["seconds from the start of `dataservice serve`", "start", "resume"]]
    rows.append(["a Ray of its own is up (measured alone)", f"{ray_s:.1f}", f"{ray_s:.1f}"])
    for i, name in enumerate(names):
        rows.append([name, f"{middle['start'][i]:.1f}", f"{middle['resume'][i]:.1f}"])
    print("\n".join(aligned(rows)), "\n")
    figures = [
        Figure(
            name=f"{kind}: first batch beyond Ray's own start",
            value=middle[kind][-1] - ray_s,
            unit="s",
            target=f"below {TARGET_S:g}",
            reached=middle[kind][-1] - ray_s < TARGET_S,
        )
        for kind in middle
    ]
    again_s = statistics.median(beside)
    figures.append(
        Figure(
            name="resume beside a running service: first batch",
            value=again_s,
            unit="s",
            target=f"below {TARGET_S:g}",
            reached=again_s < TARGET_S,
        )
    )
    for figure in figures:
        show(figure)
    return 0 if show_reached(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
