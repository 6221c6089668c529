"""A Ray cluster on this machine whose own autoscaler adds data nodes on demand, and removes
those that nobody uses.

Invariants: whatever it started has ended with it, found by a mark in its environment; other
clusters of the machine are left alone.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dataservice.actors.ray_local import LOOPBACK, ray_environment
from support.service_processes import free_port

START_S = 90.0
MARK = "GROWING_CLUSTER"
HEAD = "f" * 51 + "00000"
"""Node id that Ray's provider of such nodes expects."""


def _config(address: str, node: dict[str, float], most: int) -> dict[str, Any]:
    lists = (
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
    )
    return {
        "cluster_name": "growing",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,  # nothing is to be installed on them
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,  # they share an address
        },
        "auth": {},
        "docker": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "data": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }


@contextmanager
def growing_cluster(folder: Path, *, node: dict[str, float], most: int) -> Iterator[str]:
    """Address of a cluster whose head runs nothing, to which Ray adds up to `most` nodes with the
    resources of `node`. `folder`: of a short path, for Ray's files."""
    ray_environment()
    mark, port = secrets.token_hex(8), free_port()
    address = f"{LOOPBACK}:{port}"
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(_config(address, node, most)))
    environment = os.environ | {
        MARK: mark,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    }
    options = {"port": port, "temp-dir": folder / "ray", "autoscaling-config": config}
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", "--num-cpus=0", "--include-dashboard=false"]
    command += ["--object-store-memory=100000000", f"--node-ip-address={LOOPBACK}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for_start(head, Path(log.name))
            yield address
        finally:
            head.terminate()
            with suppress(subprocess.TimeoutExpired):
                head.wait(10)
            _end_all(mark)
            head.wait(5)


def _wait_for_start(head: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert head.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.2)


def _end_all(mark: str) -> None:
    """Nodes outlive the head that started them."""
    ours = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                ours.append(process)
    for process in ours:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ours, 10)
