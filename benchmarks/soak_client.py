"""Runs trainer ranks over a real service for many steps and looks for what grows.

    make soak-client
    python benchmarks/soak_client.py [--steps 10000] [--ranks 4] [--micro-steps 2] [--work DIR]

A coordinator with its planner and a worker, each a process, without Ray, serve an endless run over
made-up text and small pictures. Each rank is a process that reads its packs and meets the others
(all_reduce) at the end of every step; the ranks with an even number read through shared memory, the
others over gRPC. Once a second memory, threads and descriptors of all processes and the size of
/dev/shm are noted; printed are lines through what follows the first fifth.

Exits with 1 unless all is flat. A rank's memory levels off within some 2,000 steps; a run of few
more shows that as growth.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from figures import Figure, machine, show, show_reached
from flatness import Flatness
from gloo_ranks import Ranks, served_elsewhere
from measuring import SPAWN
from PIL import Image

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.state_log import StateLog
from dataservice.actors.worker import Worker
from dataservice.config import load_config
from dataservice.indexing import update_index
from dataservice.rpc.server import start_server
from trainer_client import PackStream, ParallelLayout

JOB = "soak"
SAMPLES = 2000
LIMIT_S = 7200.0
STOP_POLL_S = 0.2


def write_data(folder: Path) -> None:
    random = np.random.Generator(np.random.Philox(3))
    folder.mkdir(parents=True)
    lines = []
    with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
        for number in range(SAMPLES):
            text = "word " * int(random.integers(4, 60))
            record: dict[str, Any] = {"id": str(number)}
            asked = text
            if number % 2:
                height, width = (int(side) for side in random.integers(40, 200, 2))
                small = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
                stored = io.BytesIO()
                Image.fromarray(small).resize((width, height)).save(stored, "JPEG")
                archive.writestr(f"{number}.jpg", stored.getvalue())
                record["image"], asked = f"{number}.jpg", f"<image>\n{text}"
            turns = [("human", asked), ("gpt", f"Answer {number}: {text}")]
            record["conversations"] = [{"from": who, "value": said} for who, said in turns]
            lines.append(json.dumps(record))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")


def config_text(folder: Path) -> str:
    return f"""
job: {JOB}
index_dir: {folder}/index
state_dir: {folder}/state
sources:
  - {{name: soak, records: {folder}/data/*.jsonl, images: {folder}/data/*.zip, weight: 1}}
vision: {{max_pixels: 50176}}
plan: {{pack_length: 1024, epochs: endless, packer: lbf}}
workers: {{count: 1, min: 1, max: 1, decode_threads: 1, ready_bytes: 64 MiB}}
serving: {{port: 0}}
"""


# ---- processes ----------------------------------------------------------------------------------


def serve_coordinator(answer: Any, stop: Any, config_path: str) -> None:
    async def run() -> None:
        config = load_config(config_path)
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
        log = StateLog(str(Path(config.state_dir) / "coordinator.journal"))
        coordinator = Coordinator(config, PlannerProcess(), log)
        server = await start_server(coordinator=coordinator, bind="127.0.0.1:0")
        await coordinator.start()
        answer.send(server.endpoint)
        while not stop.is_set():
            await asyncio.sleep(STOP_POLL_S)
        await server.stop(0)
        await coordinator.stop()

    asyncio.run(run())


def serve_worker(answer: Any, stop: Any, endpoint: str) -> None:
    async def run() -> None:
        worker = Worker(coordinator=endpoint, worker_id="worker-0", node="n0")
        running = asyncio.ensure_future(worker.run())
        answer.send("started")
        while not (stop.is_set() or running.done()):
            await asyncio.sleep(STOP_POLL_S)
        worker.stop()
        await running

    asyncio.run(run())


def rank_main(rank: int, ranks: int, endpoint: str, args: argparse.Namespace, progress: Any) -> Any:
    """(packs received, through shared memory, seconds waited)"""
    meeting = torch.zeros(1)
    with PackStream(
        endpoint,
        job=JOB,
        layout=ParallelLayout.data_parallel(rank, ranks),
        micro_steps=args.micro_steps,
        local=rank % 2 == 0,
    ) as stream:
        for batch in stream:
            if not batch.is_last_micro_step:
                continue
            dist.all_reduce(meeting)
            if rank == 0:
                progress.value = batch.step + 1
            if batch.step + 1 == args.steps:
                break
        stats = stream.stats()
    return stats.received_packs, stats.local_packs, stats.waited_s


def soak(folder: Path, args: argparse.Namespace) -> list[Figure]:
    write_data(folder / "data")
    config = folder / "run.yaml"
    config.write_text(config_text(folder))
    update_index(load_config(config))
    progress, began = SPAWN.Value("q", 0), time.monotonic()
    with ExitStack() as stack:
        endpoint, coordinator = stack.enter_context(
            served_elsewhere(serve_coordinator, str(config))
        )
        _, worker = stack.enter_context(served_elsewhere(serve_worker, endpoint))
        ranks = stack.enter_context(Ranks(rank_main, args.ranks, endpoint, args, progress))
        pids = {f"rank {i}": process.pid for i, process in enumerate(ranks.processes)}
        pids |= {"coordinator": coordinator.pid, "worker": worker.pid}
        for child in psutil.Process(coordinator.pid).children():
            if "resource_tracker" not in " ".join(child.cmdline()):
                pids["planner"] = child.pid
        flatness = Flatness.of({name: pid for name, pid in pids.items() if pid is not None})
        flatness.watch(
            lambda: int(progress.value), lambda: ranks.running and progress.value < args.steps
        )
        told = ranks.results(LIMIT_S)
    took_s = time.monotonic() - began
    packs, local = sum(rank[0] for rank in told), sum(rank[1] for rank in told)
    print(f"{args.steps} steps, {packs} packs ({local} through shared memory) in {took_s:.0f} s\n")
    return [
        *flatness.figures(),
        Figure(
            name="share of packs through shared memory",
            value=local / packs,
            unit="",
            target="more than none, less than all",
            reached=0 < local < packs or args.ranks == 1,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-steps", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where the data go (some MB)")
    args = parser.parse_args()
    print(f"machine:  {machine()}\ntorch:    {torch.__version__}")
    print(f"command:  python {' '.join(sys.argv)}\n", flush=True)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="soak-") as name:
        found = soak(Path(name), args)
    for figure in found:
        show(figure)
    raise SystemExit(0 if show_reached(found) else 1)


if __name__ == "__main__":
    main()
