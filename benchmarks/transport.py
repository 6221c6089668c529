"""Our two ways to bring a pack from a worker to a trainer, beside what could take their place.

    python benchmarks/transport.py [--rounds 15] [--megabytes 1 8 20] [--a-round 80] [--only WORD]

Ours over gRPC (as from another host; also with TLS and a token) and through shared memory (on the
same host) beside bare gRPC, a TCP and a Unix socket read with recv_into, and Arrow Flight. Every
way has its server in a process of its own, all of them run the whole time, and the ways take turns:
in a round each brings `--a-round` megabytes one block after the other, asking for the next when it
has one. What is printed is the median over the rounds of GB/s and of CPU seconds a GB of the
serving and the reading process; a ratio is the median of the ratios of the same rounds.

The ways do not do the same work: ours, over both ways, ends in checked arrays of a reused buffer;
the sockets end in a reused buffer; bare gRPC and Flight hand over messages, left where they lie.
Pixels are random, so that ours compresses none. Bare gRPC and Flight cut blocks into messages of
the same size as ours. "Tuned" is bare gRPC with what ours has on top of gRPC's defaults: our
channel's options, and streams read by the thread that wants them.

Exits with 1 unless ours reaches 0.8 of bare gRPC over gRPC and twice bare gRPC on the same host.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from figures import Figure, machine, show, show_reached
from reports import aligned
from transports.clients import BARE_GRPC, OURS_LOCAL, OURS_REMOTE, TUNED_GRPC, WAYS, Bring, Way

from dataservice.wire import checksum

SERVERS = Path(__file__).parent / "transports" / "servers.py"
LEAST_REMOTE, LEAST_LOCAL = 0.8, 2.0
"""Of bare gRPC's speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One way's part of a round."""

    gb_s: float
    server_s_gb: float
    client_s_gb: float


class Server:
    """A process of transports.servers, until `close`."""

    def __init__(self, kind: str, sizes: Sequence[int]) -> None:
        command = [sys.executable, str(SERVERS), kind, *map(str, sizes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.where = self._process.stdout.readline().strip()
        if not self.where:
            raise SystemExit(f"the server {kind} ended before it served")

    @property
    def cpu_s(self) -> float:
        """Of all its threads, to the microsecond: Linux has a clock for each process."""
        return time.clock_gettime((~self._process.pid) << 3 | 2)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def one_run(bring: Bring, server: Server, number: int, size_bytes: int, blocks: int) -> Run:
    bring(number)
    theirs, ours, began = server.cpu_s, time.process_time(), time.perf_counter()
    for _ in range(blocks):
        bring(number)
    seconds = time.perf_counter() - began
    ours, theirs = time.process_time() - ours, server.cpu_s - theirs
    gigabytes = size_bytes * blocks / 1e9
    return Run(
        gb_s=gigabytes / seconds, server_s_gb=theirs / gigabytes, client_s_gb=ours / gigabytes
    )


Runs = dict[int, dict[str, list[Run]]]
"""By size and name of a way, one a round."""


def measure(ways: Sequence[Way], sizes: Sequence[int], rounds: int, a_round: int) -> Runs:
    servers = {kind: Server(kind, sizes) for kind in dict.fromkeys(way.server for way in ways)}
    try:
        brings = {way.name: way.connect(servers[way.server].where, sizes) for way in ways}
        runs: Runs = {size: {way.name: [] for way in ways} for size in sizes}
        for turn in range(rounds):
            for number, size in enumerate(sizes):
                for way in ways if turn % 2 == 0 else reversed(ways):
                    blocks = max(1, round(a_round / size))
                    run = one_run(brings[way.name], servers[way.server], number, size, blocks)
                    runs[size][way.name].append(run)
        return runs
    finally:
        for server in servers.values():
            server.close()


def figures(runs: Runs) -> list[Figure]:
    aims = (
        (OURS_REMOTE, BARE_GRPC, LEAST_REMOTE),
        (OURS_REMOTE, TUNED_GRPC, None),
        (OURS_LOCAL, BARE_GRPC, LEAST_LOCAL),
    )
    return [
        ratio(runs[size][way.name], runs[size][other.name], f"{way.name}, {size / 1e6:g} MB", least)
        for way, other, least in aims
        for size in runs
        if way.name in runs[size] and other.name in runs[size]
    ]


def ratio(of: list[Run], to: list[Run], name: str, least: float | None) -> Figure:
    value = statistics.median(a.gb_s / b.gb_s for a, b in zip(of, to, strict=True))
    return Figure(
        name=name,
        value=value,
        unit="of bare gRPC, tuned" if least is None else "of bare gRPC",
        target="" if least is None else f"{least:g}",
        reached=None if least is None else value >= least,
    )


def table(size: int, runs: dict[str, list[Run]]) -> list[str]:
    def median(of: list[Run], name: str) -> float:
        return statistics.median(getattr(run, name) for run in of)

    rows = [(f"{size / 1e6:g} MB", "GB/s", "CPU s/GB server", "client", "GB/s by round")]
    for name, of in runs.items():
        costs = [f"{median(of, key):.2f}" for key in ("gb_s", "server_s_gb", "client_s_gb")]
        rows.append((name, *costs, " ".join(f"{run.gb_s:.2f}" for run in of)))
    return aligned(rows)


def about() -> dict[str, str]:
    names = ("grpcio", "numpy", "pyarrow", "zstandard")
    return {
        "machine": machine(),
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f", CRC-32 of {checksum.crc32.__module__ or 'zlib'}",
        "command": "python benchmarks/transport.py " + " ".join(sys.argv[1:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 8.0, 20.0])
    parser.add_argument("--a-round", type=float, default=80.0, help="megabytes of one way")
    parser.add_argument(
        "--only", nargs="+", default=[], help="ways with one of these in their name"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ways = [way for way in WAYS if not given.only or any(w in way.name for w in given.only)]
    sizes = [round(size * 1e6) for size in given.megabytes]
    facts = about()
    runs = measure(ways, sizes, given.rounds, round(given.a_round * 1e6))
    found = figures(runs)
    if given.json:
        cells = {
            str(size): {name: [asdict(run) for run in of] for name, of in of_size.items()}
            for size, of_size in runs.items()
        }
        print(json.dumps({**facts, "runs": cells, "figures": [asdict(f) for f in found]}))
        return int(not all(figure.reached for figure in found))
    for name, value in facts.items():
        print(f"{name:10}{value}")
    for size, of_size in runs.items():
        print("\n" + "\n".join(table(size, of_size)))
    print()
    for figure in found:
        show(figure)
    return int(not show_reached(found))


if __name__ == "__main__":
    sys.exit(main())
