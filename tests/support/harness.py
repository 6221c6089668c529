"""A service on a Ray cluster of several nodes on this machine, and ranks that read from it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from dataservice.actors.launch import Service, running_service
from dataservice.actors.ray_local import local_cluster
from dataservice.config import Config
from trainer_client import PackStream, ParallelLayout

RESOURCE = "data_node"


@contextmanager
def cluster_service(config: Config, *, data_nodes: int = 2) -> Iterator[tuple[Service, Any]]:
    with (
        local_cluster(data_nodes, resource=RESOURCE, num_cpus=4) as cluster,
        running_service(config, address=cluster.address) as service,
    ):
        yield service, cluster


@dataclass
class Delivery:
    """One micro-batch as its rank got it."""

    step: int
    micro_step: int
    dp_rank: int
    pack_ids: tuple[str, ...]
    numbers: tuple[int, ...]
    """Global pack numbers."""
    digests: tuple[str, ...]
    sample_keys: tuple[tuple[str, ...], ...]
    """By pack."""
    loss_tokens: int
    holes: tuple[str, ...]
    waited_s: float = 0.0
    at: float = 0.0
    """Monotonic time when the trainer had it, in seconds."""


def delivery_of(batch: Any, dp_rank: int) -> Delivery:
    """Just now."""
    meta = batch.meta
    return Delivery(
        step=batch.step,
        micro_step=batch.micro_step,
        dp_rank=dp_rank,
        pack_ids=tuple(meta["pack_ids"]),
        numbers=tuple(meta["pack_numbers"]),
        digests=tuple(meta["digests"]),
        sample_keys=tuple(tuple(keys) for keys in meta["sample_keys"]),
        loss_tokens=meta["loss_tokens"],
        holes=tuple(meta["holes"]),
        waited_s=meta["waited_s"],
        at=time.monotonic(),
    )


@dataclass
class Readers:
    """What all ranks got, and the state of each after its last batch."""

    deliveries: list[Delivery] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    waited_s: float = 0.0
    local_packs: int = 0
    """That came through shared memory, of ranks that came to their end."""
    retries: int = 0
    """Of the streams of those ranks."""

    def packs_of_step(self) -> dict[int, list[str]]:
        """Sorted pack ids by step."""
        steps: dict[int, list[str]] = {}
        for delivery in self.deliveries:
            steps.setdefault(delivery.step, []).extend(delivery.pack_ids)
        return {step: sorted(ids) for step, ids in sorted(steps.items())}

    def digests_of_packs(self) -> dict[tuple[int, str], str]:
        return {
            (d.step, pack_id): digest
            for d in self.deliveries
            for pack_id, digest in zip(d.pack_ids, d.digests, strict=True)
        }


def read_ranks(
    endpoint: str,
    *,
    job: str,
    dp_size: int,
    micro_steps: int,
    steps: int | None,
    states: dict[int, dict[str, Any]] | None = None,
    on_batch: Callable[[Any], None] | None = None,
    pause_s: float = 0.0,
    timeout_s: float = 120.0,
    prefetch_packs: int = 4,
    local: bool = True,
) -> Readers:
    """Runs all ranks in threads for `steps` steps (None: to the end); raises what a rank raised."""
    readers = Readers()
    run_id = uuid.uuid4().hex
    lock = threading.Lock()
    errors: list[BaseException] = []

    def rank_loop(rank: int) -> None:
        try:
            with PackStream(
                endpoint,
                job=job,
                layout=ParallelLayout.data_parallel(rank, dp_size),
                micro_steps=micro_steps,
                run_id=run_id,
                prefetch_packs=prefetch_packs,
                timeout_s=timeout_s,
                digests=True,
                local=local,
            ) as stream:
                if states is not None:
                    stream.load_state_dict(states[rank])
                left = None if steps is None else steps * micro_steps
                while left is None or left > 0:
                    batch = next(stream, None)
                    if batch is None:
                        break
                    if on_batch is not None:
                        on_batch(batch)
                    delivery = delivery_of(batch, rank)
                    with lock:
                        readers.deliveries.append(delivery)
                        readers.waited_s += delivery.waited_s
                    if left is not None:
                        left -= 1
                    if pause_s:
                        time.sleep(pause_s)
                with lock:
                    readers.states[rank] = stream.state_dict()
                    readers.local_packs += stream.stats().local_packs
                    readers.retries += stream.stats().retries
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_loop, args=(rank,)) for rank in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return readers


@contextmanager
def two_streams(
    endpoint: str, *, job: str, prefetch_packs: int, timeout_s: float
) -> Iterator[tuple[PackStream, PackStream]]:
    """Both ranks of a run of four micro-steps, open."""
    first, second = (
        PackStream(
            endpoint,
            job=job,
            layout=ParallelLayout.data_parallel(rank, 2),
            micro_steps=4,
            run_id="two",
            prefetch_packs=prefetch_packs,
            timeout_s=timeout_s,
        )
        for rank in range(2)
    )
    opening = threading.Thread(target=first.open)
    opening.start()
    second.open()
    opening.join()
    with first, second:
        yield first, second


def listener(endpoint: str) -> int:
    """Process that listens at "host:port"."""
    port = int(endpoint.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            assert connection.pid is not None
            return connection.pid
    raise LookupError(endpoint)


def worker_pids(service: Service) -> list[int]:
    """Of the workers that the coordinator knows and that still run."""
    pids = []
    for worker in service.status()["workers"]:
        with suppress(LookupError):
            pids.append(listener(worker["endpoint"]))
    return pids


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def plan_of(config_path: str, *, steps: str, dp_size: int, micro_steps: int) -> list[dict]:
    """`dataservice plan --json` of another process."""
    import json
    import sys

    command = [sys.executable, "-m", "dataservice.cli", "plan", config_path]
    options = ["--steps", steps, "--dp-size", str(dp_size), "--micro-steps", str(micro_steps)]
    done = subprocess.run(
        [*command, *options, "--json"], check=True, capture_output=True, text=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
