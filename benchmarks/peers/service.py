"""Our service as users start it: `dataservice serve`, its Ray, coordinator, workers, and a client.

Invariants: an epoch follows the other without an end that the run could reach; the client's
settings are its defaults.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from peers.work import Batch, Setup, Started

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
POLL_S = 0.1
MICRO_STEPS = 8
EPOCHS = 1000
LATER_PIECE = re.compile(r"\[[1-9]\d*:\d+\]$")
"""Ends the key of what is not the beginning of its sample."""


def write_config(path: Path, folder: Path, sources: list[str], index_dir: Path) -> None:
    """For `sources` below `folder`; what a run changes is left to `run_config`."""
    settings = {
        "job": "peers",
        "index_dir": str(index_dir),
        "state_dir": str(index_dir / "unused"),
        "sources": [{"name": name, "records": str(folder / name / "*.jsonl")} for name in sources],
        "plan": {"epochs": EPOCHS},
    }
    path.write_text(yaml.safe_dump(settings))


def run_config(setup: Setup, state_dir: Path) -> Path:
    settings: dict[str, Any] = yaml.safe_load(setup.config.read_text())
    settings |= {
        "state_dir": str(state_dir / "state"),
        "vision": {"exact": setup.exact},
        "workers": {"count": setup.service_workers, "decode_threads": setup.service_threads},
    }
    path = state_dir / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@contextmanager
def served(setup: Setup) -> Iterator[str]:
    """The endpoint, once all workers are there."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        config = run_config(setup, Path(folder))
        command = [sys.executable, "-m", "dataservice.cli", "serve", str(config)]
        process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr)
        try:
            endpoint = f"127.0.0.1:{port}"
            await_workers(process, endpoint, setup.service_workers)
            yield endpoint
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_LIMIT_S)
            finally:
                process.kill()


def await_workers(process: subprocess.Popen[bytes], endpoint: str, count: int) -> None:
    from dataservice.errors import DataServiceError
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.messages import GetStatus

    until = time.monotonic() + START_LIMIT_S
    with CoordinatorClient(endpoint) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise RuntimeError(f"dataservice serve ended with code {process.returncode}")
            try:
                status = json.loads(client.call(GetStatus(), 5.0).status)
                if len(status.get("workers", ())) >= count:
                    return
            except DataServiceError:
                pass
            time.sleep(POLL_S)
    raise RuntimeError(f"dataservice serve was not ready within {START_LIMIT_S:g} s")


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    from trainer_client import PackStream, ParallelLayout

    with (
        served(setup) as endpoint,
        PackStream(
            endpoint,
            job="peers",
            layout=ParallelLayout.data_parallel(0, 1),
            micro_steps=MICRO_STEPS,
        ) as stream,
    ):
        started()
        yield map(counted, stream)


def counted(batch: Any) -> Batch:
    if batch.meta["holes"]:
        raise RuntimeError(f"holes: {batch.meta['holes']}")
    keys = [key for pack in batch.meta["sample_keys"] for key in pack]
    batch["num_samples"] = sum(LATER_PIECE.search(key) is None for key in keys)
    padded = int(batch["doc_ids"][-1]) < 0
    batch["num_tokens"] = int(batch["cu_seqlens"][-2 if padded else -1])
    result: Batch = batch
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
