"""The main job end to end on this machine: index, plan, serve on a Ray of two data nodes, train.

Two ranks of a tiny vision-language model read the small corpus in tests/data through the service.
Afterwards the ranks' own logs are compared with a plan that another process computes, and a
summary is printed; the exit code is 0 only when every pack arrived exactly once.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "demo.yaml"
DP_SIZE = 2
MICRO_STEPS = 4
TRAINER_TIMEOUT_S = 280
ALL_STEPS = "0:1000000"


def dataservice(*arguments: str) -> str:
    """The standard output of `dataservice ...` in a process of its own."""
    command = [sys.executable, "-m", "dataservice.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def two_data_nodes(resource: str, temp_dir: Path) -> Iterator[str]:
    """A Ray cluster on this machine with a head and two data nodes; yields its address.

    Ray keeps its logs and sockets below `temp_dir`, whose path must be short for that.
    """
    from dataservice.actors.ray_local import local_cluster

    os.environ["RAY_TMPDIR"] = str(temp_dir)
    with local_cluster(2, resource=resource, num_cpus=2) as cluster:
        yield cluster.address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train(endpoint: str, job: str, log_dir: Path) -> None:
    """Runs all ranks to the end of the data; raises when one fails or none ends in time."""
    port = free_port()
    ranks = []
    for rank in range(DP_SIZE):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(DP_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TMPDIR": str(log_dir),  # torch makes a folder of its own there
        }
        command = [sys.executable, str(HERE / "demo_trainer.py"), "--endpoint", endpoint]
        options = ["--job", job, "--micro-steps", str(MICRO_STEPS), "--log-dir", str(log_dir)]
        ranks.append(subprocess.Popen([*command, *options], env=env))
    end = time.monotonic() + TRAINER_TIMEOUT_S
    try:
        for rank in ranks:
            code = rank.wait(max(1.0, end - time.monotonic()))
            if code:
                raise SystemExit(f"a trainer rank ended with code {code}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def idle_share(rows: list[list[int]]) -> float:
    """Share of rank time spent waiting when all ranks meet at every micro-step and the language
    model's time is as long as the mean vision time. `rows` hold the ranks' costs by micro-step."""
    mean = sum(map(sum, rows)) / sum(map(len, rows))
    busy = sum(mean + sum(row) / len(row) for row in rows)
    return 1 - busy / sum(mean + max(row) for row in rows)


def planned_rows(steps: list[dict[str, Any]], *, arrival: bool) -> list[list[int]]:
    rows = []
    for step in steps:
        cost = {
            (c["micro_step"], c["dp_rank"]): sum(p["cost"] for p in c["packs"])
            for c in step["cells"]
        }
        if arrival:
            packs = sorted((p for c in step["cells"] for p in c["packs"]), key=_arrival_key)
            cost = {divmod(i, DP_SIZE): pack["cost"] for i, pack in enumerate(packs)}
        for micro_step in range(MICRO_STEPS):
            rows.append([cost[micro_step, rank] for rank in range(DP_SIZE)])
    return rows


def _arrival_key(pack: dict[str, Any]) -> int:
    number: int = pack["number"]
    return number if number >= 0 else sys.maxsize


def compare(steps: list[dict[str, Any]], delivered: list[dict[str, Any]]) -> dict[str, int]:
    """What was planned against what the ranks counted in their own batches: step, cell, pack,
    samples, tokens and images of each."""
    planned = Counter(
        (
            *(step["step"], cell["micro_step"], cell["dp_rank"], pack["pack_id"]),
            *(pack["tokens"], pack["num_images"], *pack["sample_keys"]),
        )
        for step in steps
        for cell in step["cells"]
        for pack in cell["packs"]
    )
    arrived = Counter(
        (
            *(line["step"], line["micro_step"], line["dp_rank"], *line["pack_ids"]),
            *(line["tokens"], line["num_images"], *line["sample_keys"][0]),
        )
        for line in delivered
    )
    return {
        "packs": sum(arrived.values()),
        "padding": sum(name.startswith("pad.") for line in delivered for name in line["pack_ids"]),
        "duplicates": sum((arrived - planned).values()),
        "missing": sum((planned - arrived).values()),
    }


def run(folder: Path) -> int:
    from dataservice.actors.launch import running_service
    from dataservice.config import load_config

    os.environ["DEMO_DIR"] = str(folder)
    started = time.monotonic()
    print("index: reading tests/data", flush=True)
    dataservice("index", str(CONFIG))
    print("plan: computed by a process of its own, to compare with", flush=True)
    options = ("--steps", ALL_STEPS, "--dp-size", str(DP_SIZE), "--micro-steps", str(MICRO_STEPS))
    steps = [
        json.loads(x) for x in dataservice("plan", str(CONFIG), *options, "--json").splitlines()
    ]
    config = load_config(str(CONFIG))
    print("serve: Ray with a head and two data nodes on this machine", flush=True)
    with (
        two_data_nodes(config.workers.resource, folder) as address,
        running_service(config, address=address) as service,
    ):
        print(f"train: {DP_SIZE} ranks read from {service.endpoint}", flush=True)
        training = time.monotonic()
        train(service.endpoint, config.job, folder)
        training = time.monotonic() - training
        status = service.status()
    delivered = [
        json.loads(line)
        for rank in range(DP_SIZE)
        for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()
    ]
    found = compare(steps, delivered)
    waits = [[x["waited_s"] for x in delivered if x["dp_rank"] == r] for r in range(DP_SIZE)]
    tokens = sum(line["tokens"] for line in delivered)
    fill = tokens / max(1, (found["packs"] - found["padding"]) * config.plan.pack_length)
    staged = sum(worker["read_staged_bytes"] for worker in status["workers"])
    origin = sum(worker["read_origin_bytes"] for worker in status["workers"])
    print(
        f"""
summary
  steps                        {len(steps)}
  packs delivered              {found["packs"]} ({found["padding"]} of them padding at the end)
  duplicates, missing          {found["duplicates"]}, {found["missing"]}
  fill                         {fill:.1%}
  idle share, arrival order    {idle_share(planned_rows(steps, arrival=True)):.1%} (modelled)
  idle share, balanced         {idle_share(planned_rows(steps, arrival=False)):.1%} (modelled)
  holes                        {status["holes"]}
  trainers waited              {max(map(sum, waits)):.1f} s of {training:.1f} s (measured)
  of that for the first batch  {max(w[0] for w in waits):.1f} s
  images decoded               {sum(worker["images"] for worker in status["workers"])}
  read from staged copies      {staged / max(1, staged + origin):.0%}
  all in all                   {time.monotonic() - started:.0f} s""",
        flush=True,
    )
    return 1 if found["duplicates"] or found["missing"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", metavar="DIR", help="work in DIR and keep what is written there")
    args = parser.parse_args()
    folder = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: ended by SIGTERM"))
    try:
        return run(folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
