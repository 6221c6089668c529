"""The disaggregated layout's own Ray options and config in pods on this machine: what KubeRay would
start, with a read-only root and without rights, serves and ends."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_readme import make_secrets
from support.manifests import built, groups, of_kind
from support.pods import UID, WRITABLE, Pod, Pods, lacks, ray_start, shell, wait_until

from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus

ROOT = Path(__file__).resolve().parents[2]
EPHEMERAL = 32768
DATA = ROOT / "tests" / "data"

READER = """
import sys
from trainer_client import PackStream, ParallelLayout

options = {"job": "demo", "layout": ParallelLayout(), "micro_steps": 4, "timeout_s": 60}
with PackStream(sys.argv[1], host="node-a", **options) as stream:
    for batch in stream:
        print(batch.step, batch.micro_step, len(batch["input_ids"]))
        if batch.step == 2:
            break
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if reason := lacks():
        pytest.skip(f"no pods on this machine: {reason}")


def volume(folder: Path, name: str) -> Path:
    """With the secrets in it."""
    made = folder / name
    shutil.copytree(folder / "secrets", made)
    os.chown(made, UID, UID)
    return made


def config() -> str:
    """The overlay's, but for its data, its place for files and the size of this machine."""
    (config_map,) = of_kind(built("disaggregated"), "ConfigMap")
    run = yaml.safe_load(config_map["data"]["run.yaml"])
    run |= {"job": "demo", "index_dir": f"{WRITABLE}/index", "state_dir": f"{WRITABLE}/state"}
    run["sources"] = [
        {
            "name": "caption",
            "records": str(DATA / "caption" / "*.jsonl"),
            "images": str(DATA / "caption" / "*.zip"),
        }
    ]
    run["plan"] = {"pack_length": 2048, "packer": "lbf"}
    run["vision"] = {"max_pixels": 200704}
    run["staging"] |= {"cache_dir": f"{WRITABLE}/cache", "budget_bytes": "64 MiB"}
    # Until TLS and token are all it takes to listen at 0.0.0.0.
    run["serving"]["insecure"] = True
    run["workers"] |= {"min": 1, "max": 1, "num_cpus": 1.0, "memory_bytes": "2 GiB"}
    return (
        yaml.safe_dump(run)
        .replace("/etc/dataservice/token/", f"{WRITABLE}/")
        .replace("/etc/dataservice/tls/", f"{WRITABLE}/")
    )


def image_environment(**more: str) -> dict[str, str]:
    """As the image and KubeRay set it."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": "/tmp",
        "XDG_CACHE_HOME": "/tmp/cache",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_ARENA_MAX": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        **client_environment(WRITABLE),
        **more,
    }


def client_environment(secrets: str) -> dict[str, str]:
    """Of whoever speaks to the service, as the manifests set it."""
    (container,) = groups("disaggregated")["nvme"]["template"]["spec"]["containers"]
    given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    return {name: f"{secrets}/{Path(v).name}" if "/" in v else v for name, v in given.items()}


def parameters(group: str, **more: str) -> Mapping[str, str]:
    given: dict[str, str] = groups("disaggregated")[group]["rayStartParams"]
    return {"num-cpus": "2", **given, **more}  # num-cpus: of the container's limits otherwise


def answers(pod: Pod, port: int, path: str, scheme: str = "http") -> bool:
    """To the kubelet, which has no token and looks at no certificate."""
    trusting = ssl._create_unverified_context()
    url = f"{scheme}://{pod.address}:{port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=2, context=trusting) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def status(endpoint: str) -> dict[str, Any]:
    """By whoever has the variables of `client_environment`."""
    with CoordinatorClient(endpoint) as client:
        found: dict[str, Any] = json.loads(client.call(GetStatus(), 10.0).status)
    return found


def outward_ports(pod: Pod) -> dict[int, str]:
    names = {}
    commands = {process.pid: " ".join(process.cmdline()) for process in pod.processes()}
    for port, pids in pod.listening().items():
        names[port] = " ".join(commands.get(pid, "") for pid in pids)
    return names


def start(pods: Pods, folder: Path) -> tuple[Pod, Pod, Pod]:
    head = pods.start(
        "head",
        shell(ray_start(parameters("head"), address=None)),
        image_environment(),
        volume=volume(folder, "head-volume"),
    )
    wait_until(lambda: answers(head, 8265, "/api/gcs_healthz"), "head", 120, head)
    address = "head:6379"
    state = volume(folder, "state")
    (state / "run.yaml").write_text(config())
    coordinator = pods.start(
        "coordinator",
        [str(ROOT / "deploy/docker/serve_on_ray.sh"), f"{WRITABLE}/run.yaml"],
        image_environment(
            RAY_ADDRESS=address,
            KUBERAY_GEN_RAY_START_CMD=ray_start(parameters("coordinator"), address=address),
            NUMBA_CACHE_DIR=f"{WRITABLE}/numba",
        ),
        volume=state,
    )
    data = pods.start(
        "data",
        shell(ray_start(parameters("nvme"), address=address)),
        image_environment(RAY_ADDRESS=address, DATASERVICE_HOST="node-a"),
        volume=volume(folder, "disk"),
    )
    return head, coordinator, data


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_layout_serves_in_pods_without_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    make_secrets(secrets)
    for name, value in client_environment(str(secrets)).items():
        monkeypatch.setenv(name, value)
    with Pods() as pods:
        every = _, coordinator, data = start(pods, tmp_path)
        endpoint = f"{coordinator.address}:7070"
        wait_until(
            lambda: answers(coordinator, 7071, "/healthz", "https"), "coordinator", 180, *every
        )
        wait_until(
            lambda: status(endpoint)["workers"] and status(endpoint)["stagers"],
            "worker and stager",
            120,
            *every,
        )
        for pod in (coordinator, data):  # as the kubelet asks, without a token
            assert answers(pod, 6384, "/api/local_raylet_healthz")
        read = subprocess.run(
            [sys.executable, "-c", READER, endpoint], capture_output=True, text=True, timeout=120
        )
        assert read.returncode == 0, read.stderr + coordinator.output() + data.output()
        assert len(read.stdout.splitlines()) == 2 * 4 + 1
        for pod in every:
            assert {process.uids().effective for process in pod.processes()} == {UID}
        for pod in every:  # as base/network.yaml says: Ray below, packs and metrics above
            for port, command in outward_ports(pod).items():
                assert port < EPHEMERAL or "Actor" in command, (pod.name, port, command)
        assert any(port >= EPHEMERAL for port in outward_ports(data))
        assert {7070, 7071} <= outward_ports(coordinator).keys()
        (stager,) = status(endpoint)["stagers"]
        assert stager["host"] == "node-a"
        coordinator.terminate()
        assert coordinator.wait(120) == 143, coordinator.output()
        assert (tmp_path / "state" / "state").is_dir()
        data.terminate()
        data.wait(120)
