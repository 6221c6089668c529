"""What the image holds, and the disaggregated layout in pods on this machine.

Its own Ray options and config: what KubeRay would start, with a read-only root and without rights,
serves, and ends."""

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
from support.image import build_image_venv, image_environment
from support.manifests import built, groups, of_kind
from support.pods import UID, WRITABLE, Pod, Pods, lacks, ray_start, shell, wait_until

from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus

ROOT = Path(__file__).resolve().parents[2]
EPHEMERAL = 32768
DATA = ROOT / "tests" / "data"

READER = """
import sys, time
from trainer_client import PackStream, ParallelLayout

options = {"job": "demo", "layout": ParallelLayout(), "micro_steps": 4, "timeout_s": 90}
with PackStream(sys.argv[1], host="node-a", **options) as stream:
    for batch in stream:
        print(batch.step, batch.micro_step, len(batch["input_ids"]), flush=True)
        time.sleep(0.5)
        if batch.step == STEPS:
            break
""".replace("STEPS", "4")


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
    run["plan"] = {"pack_length": 2048, "packer": "lbf", "epochs": 20}
    run["vision"] = {"max_pixels": 200704}
    run["staging"] |= {"cache_dir": f"{WRITABLE}/cache", "budget_bytes": "64 MiB"}
    run["workers"] |= {"min": 2, "max": 2, "num_cpus": 1.0, "memory_bytes": "2 GiB"}
    return (
        yaml.safe_dump(run)
        .replace("/etc/dataservice/token/", f"{WRITABLE}/")
        .replace("/etc/dataservice/tls/", f"{WRITABLE}/")
    )


def environment(venv: Path, **more: str) -> dict[str, str]:
    """As image, KubeRay and manifests set it."""
    given = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "GRPC_DNS_RESOLVER": "native",  # names are in /etc/hosts here
    }
    return image_environment(venv, **given, **client_environment(WRITABLE), **more)


def client_environment(secrets: str) -> dict[str, str]:
    """Of whoever speaks to the service, as the manifests set it."""
    (container,) = groups("disaggregated")["nvme"]["template"]["spec"]["containers"]
    given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    return {name: f"{secrets}/{Path(v).name}" if "/" in v else v for name, v in given.items()}


def parameters(group: str, **more: str) -> Mapping[str, str]:
    given: dict[str, str] = groups("disaggregated")[group]["rayStartParams"]
    return {"num-cpus": "1", **given, **more}  # num-cpus: of the container's limits otherwise


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


def start(pods: Pods, folder: Path, venv: Path) -> tuple[Pod, Pod, list[Pod]]:
    head = pods.start(
        "head",
        shell(ray_start(parameters("head"), address=None)),
        environment(venv),
        volume=volume(folder, "head-volume"),
    )
    wait_until(lambda: answers(head, 8265, "/api/gcs_healthz"), "head", 180, head)
    address = "head:6379"
    state = volume(folder, "state")
    (state / "run.yaml").write_text(config())
    coordinator = pods.start(
        "dataservice",  # by the name of its Service
        [str(ROOT / "deploy/docker/serve_on_ray.sh"), f"{WRITABLE}/run.yaml"],
        environment(
            venv,
            RAY_ADDRESS=address,
            KUBERAY_GEN_RAY_START_CMD=ray_start(parameters("coordinator"), address=address),
            NUMBA_CACHE_DIR=f"{WRITABLE}/numba",
        ),
        volume=state,
    )
    command = shell(ray_start(parameters("nvme"), address=address))
    data = [
        pods.start(
            f"data-{name}",
            command,
            environment(venv, RAY_ADDRESS=address, DATASERVICE_HOST=f"node-{name}"),
            volume=volume(folder, f"disk-{name}"),
        )
        for name in "ab"
    ]
    return head, coordinator, data


def pre_stop() -> list[str]:
    (container,) = groups("disaggregated")["nvme"]["template"]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


def steps_read(reader: subprocess.Popen[str]) -> list[str]:
    output, errors = reader.communicate(timeout=180)
    assert reader.returncode == 0, errors
    return output.splitlines()


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_image_venv(tmp_path_factory.mktemp("image"))


@pytest.mark.clusters
@pytest.mark.timeout(900)
def test_the_image_works_without_torch(tmp_path: Path, venv: Path) -> None:
    installed = {path.name for path in (venv / "lib").glob("python*/site-packages/*")}
    assert {"ray", "dataservice", "numba"} <= installed
    assert not [name for name in installed if name.startswith(("torch", "nvidia"))]
    for command in (
        ["dataservice", "--help"],
        ["dataservice", "index", str(ROOT / "deploy/demo.yaml")],
        ["ray", "kuberay-autoscaler", "--help"],
        ["ray", "job", "submit", "--help"],
        ["ray", "health-check", "--help"],  # KubeRay's init container
    ):
        done = subprocess.run(
            command,
            env=image_environment(venv, HOME=str(tmp_path), DEMO_DIR=str(tmp_path / "demo")),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo" / "index").is_dir()


@pytest.mark.clusters
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_layout_serves_in_pods_without_rights_and_a_pod_leaves(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := lacks():
        pytest.skip(f"no pods on this machine: {reason}")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    make_secrets(secrets)
    for name, value in client_environment(str(secrets)).items():
        monkeypatch.setenv(name, value)
    with Pods(venv) as pods:
        head, coordinator, data = start(pods, tmp_path, venv)
        every = (head, coordinator, *data)
        endpoint = f"{coordinator.address}:7070"
        healthy = lambda: answers(coordinator, 7071, "/healthz", "https")  # noqa: E731
        wait_until(healthy, "coordinator", 180, *every)
        hosts = lambda: {stager["host"] for stager in status(endpoint).get("stagers", [])}  # noqa: E731
        wait_until(lambda: hosts() == {"node-a", "node-b"}, "two stagers", 180, *every)
        wait_until(lambda: status(endpoint).get("workers"), "worker", 180, *every)
        for pod in (coordinator, *data):  # as the kubelet asks, without a token
            assert answers(pod, 6384, "/api/local_raylet_healthz")
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, endpoint],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline().startswith("0 0 ")
            for pod in every:
                assert {process.uids().effective for process in pod.processes()} == {UID}
            for pod in (coordinator, *data):
                for port, command in outward_ports(pod).items():  # as base/network.yaml says
                    assert port < EPHEMERAL or "Actor" in command, (pod.name, port, command)
            assert {7070, 7071} <= outward_ports(coordinator).keys()
            assert any(port >= EPHEMERAL for pod in data for port in outward_ports(pod))

            told = data[0].execute(pre_stop(), 300)
            assert told.returncode == 0
            assert "data-a is drained" in told.stdout, told.stdout + told.stderr
            data[0].terminate()
            data[0].wait(60)
            assert len(steps_read(reader)) == 4 * 4
            wait_until(lambda: hosts() == {"node-b"}, "stager gone", 60, head, coordinator)
        finally:
            reader.kill()
            reader.communicate()
        coordinator.terminate()
        assert coordinator.wait(120) == 143, coordinator.output()
