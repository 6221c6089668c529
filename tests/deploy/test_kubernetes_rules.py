"""What the manifests promise together: names that meet, pods without rights, sizes that fit."""

from __future__ import annotations

import copy
import itertools
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.manifests import (
    OVERLAYS,
    built,
    cluster_spec,
    containers,
    groups,
    of_kind,
    quantity,
    ray_resource,
    templates,
)

from dataservice import __version__
from dataservice.config import Config, load_config

DATA = ("nvme", "decode", "gpu")
EPHEMERAL = range(32768, 61000)
"""Where Linux takes free ports from."""


def config_of(overlay: str, folder: Path) -> Config:
    (config,) = of_kind(built(overlay), "ConfigMap")
    path = folder / "run.yaml"
    path.write_text(config["data"]["run.yaml"])
    return load_config(path)


def labels(template: Any) -> dict[str, str]:
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def selected(overlay: str, selector: dict[str, str], *expressions: Any) -> set[str]:
    """Pods by their groups; of `expressions` those with In."""
    assert all(e["operator"] == "In" for e in expressions)
    return {
        name
        for name, t in templates(overlay)
        if selector.items() <= labels(t).items()
        and all(labels(t)[e["key"]] in e["values"] for e in expressions)
    }


# ---- security -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_pass_the_restricted_standard_and_write_to_volumes_only(overlay: str) -> None:
    for name, template in templates(overlay):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
        assert kinds <= {"emptyDir", "ephemeral", "persistentVolumeClaim", "secret", "configMap"}
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_of_ours_has_a_token_of_kubernetes(overlay: str) -> None:
    (account,) = of_kind(built(overlay), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert not [r for r in built(overlay) if "Role" in r["kind"]]
    autoscaled = cluster_spec(overlay).get("enableInTreeAutoscaling", False)
    for name, template in templates(overlay):
        if name == "head" and autoscaled:  # KubeRay makes an account for the autoscaler in it
            assert "serviceAccountName" not in template["spec"]
            continue
        assert template["spec"]["serviceAccountName"] == account["metadata"]["name"]
        assert template["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_service_and_ray_ask_for_tokens_and_certificates(overlay: str, tmp_path: Path) -> None:
    assert cluster_spec(overlay)["authOptions"] == {"mode": "token"}
    serving = config_of(overlay, tmp_path).serving
    assert not serving.insecure
    assert serving.tls is not None
    assert serving.token_file is not None
    for name in groups(overlay).keys() - {"head"}:
        template = groups(overlay)[name]["template"]
        (container,) = template["spec"]["containers"]
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        env = {e["name"]: e.get("value") for e in container["env"]}
        for path, variable, secret in (
            (serving.tls.ca_file, "DATASERVICE_TLS_CA", "dataservice-tls"),
            (serving.tls.cert_file, "DATASERVICE_TLS_CERT", "dataservice-tls"),
            (serving.tls.key_file, "DATASERVICE_TLS_KEY", "dataservice-tls"),
            (serving.token_file, "DATASERVICE_TOKEN_FILE", "dataservice-token"),
        ):
            assert env[variable] == path  # of the command line, in a probe or by hand
            volume = volumes[mounts[str(Path(str(path)).parent)]]
            assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}
        assert env["DATASERVICE_TLS_SERVER_NAME"] == serving.tls.server_name
        assert all("subPath" not in m for m in container["volumeMounts"])  # would never be renewed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_leave_trainers_no_way_to_ray(overlay: str) -> None:
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(built(overlay), "NetworkPolicy")}
    everybody = {name for name, _ in templates(overlay)}
    for name, policy in policies.items():
        selector = policy["podSelector"]
        chosen = selected(overlay, selector["matchLabels"], *selector.get("matchExpressions", ()))
        assert (
            chosen
            == {
                "dataservice": everybody,
                "dataservice-operator": {"head"},
                "dataservice-trainers": everybody - {"head", "submitter"},
                "dataservice-watchers": everybody - {"head", "submitter"},
            }[name]
        )
    assert policies["dataservice"]["policyTypes"] == ["Ingress", "Egress"]
    (inside,) = policies["dataservice"]["ingress"]
    (peer,) = inside["from"]
    assert selected(overlay, peer["podSelector"]["matchLabels"]) == everybody
    used = set(itertools.chain.from_iterable(ray_ports(g) for g in groups(overlay).values()))
    assert not used & set(EPHEMERAL)
    for name in ("dataservice-trainers", "dataservice-watchers"):
        (rule,) = policies[name]["ingress"]
        for port in rule["ports"]:
            opened = range(port["port"], port.get("endPort", port["port"]) + 1)
            assert not used & set(opened)
            assert len(opened) == 1 or opened == EPHEMERAL


def ray_ports(group: Any) -> set[int]:
    """Those it names, and Ray's own for head, dashboard, metrics and the processes of its tasks."""
    given = {int(v) for k, v in group["rayStartParams"].items() if k.endswith("-port")}
    assert len(given) == 5
    return given | {6379, 8265, 10001, 8080} | set(range(10002, 20000))


# ---- names that meet ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_service_and_budgets_find_their_pods(overlay: str, tmp_path: Path) -> None:
    (service,) = of_kind(built(overlay), "Service")
    assert selected(overlay, service["spec"]["selector"]) == {"coordinator"}
    (container,) = groups(overlay)["coordinator"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    serving = config_of(overlay, tmp_path).serving
    assert ports == {"grpc": serving.port, "https": serving.http_port}
    for port in service["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    budgets = of_kind(built(overlay), "PodDisruptionBudget")
    covered = [selected(overlay, b["spec"]["selector"]["matchLabels"]) for b in budgets]
    data = set(DATA) & groups(overlay).keys()
    assert sorted(map(sorted, covered)) == sorted(map(sorted, ({"head"}, {"coordinator"}, data)))
    for budget in budgets:  # of other than built-in owners only integers are counted
        assert isinstance(budget["spec"]["minAvailable"], int)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_claims_and_config_are_there(overlay: str) -> None:
    names = {(r["kind"], r["metadata"]["name"]) for r in built(overlay)}
    for _, template in templates(overlay):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names
            if "ephemeral" in volume:
                wanted = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
                storage_class = wanted.get("storageClassName")
                assert storage_class is None or ("StorageClass", storage_class) in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_and_ray_are_the_versions_of_the_lock(overlay: str) -> None:
    project = __version__.partition(".dev")[0]
    assert cluster_spec(overlay)["rayVersion"] == version("ray")
    images = {name: c["image"] for name, t in templates(overlay) for c in containers(t)}
    gpu = images.pop("gpu", "my-trainer:0.1.0")
    assert gpu.startswith("my-trainer:")
    assert set(images.values()) == {f"dataservice:{project}"}


def test_one_run_is_the_default_layout_as_a_job() -> None:
    job, default = cluster_spec("run"), cluster_spec("disaggregated")
    assert job.keys() == default.keys()
    coordinators = [spec["workerGroupSpecs"].pop(0) for spec in (job, default)]
    assert job == default
    ours, theirs = (c["template"]["spec"]["containers"][0] for c in coordinators)
    assert {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} == {
        "command",  # the job runs what serve-on-ray runs there
        "env",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
    }
    spec = ray_resource("run")["spec"]
    assert json.loads(spec["entrypointResources"]) == {"coordinator": 1}
    assert spec["entrypoint"].split()[:2] == ["dataservice", "serve"]
    assert spec["entrypoint"].split()[2] == theirs["command"][-1]
    assert of_kind(built("run"), "RayCluster") == []


# ---- sizes and times ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_workers_may_take_fits_into_their_pod(overlay: str, tmp_path: Path) -> None:
    config = config_of(overlay, tmp_path)
    assert config.workers.resource == "nvme"
    assert config.workers.memory_bytes is not None
    data = {name: group for name, group in groups(overlay).items() if name in DATA}
    most = 0
    for group in data.values():
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        volumes = {v["name"]: v for v in group["template"]["spec"]["volumes"]}
        shared = quantity(volumes["shm"]["emptyDir"]["sizeLimit"])
        assert shared > 1.25 * int(group["rayStartParams"]["object-store-memory"])
        fit = int(quantity(limits["cpu"]) / config.workers.num_cpus)
        spare = quantity(limits["memory"]) - fit * config.workers.memory_bytes - shared
        assert spare >= 8 << 30  # Ray, the stager, and pages of files that are being read
        claim = volumes["cache"]["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert config.staging.cache_dir in {m["mountPath"] for m in container["volumeMounts"]}
        disk = quantity(claim["resources"]["requests"]["storage"])
        assert config.staging.budget_bytes <= 0.9 * disk
        most += group["maxReplicas"] * fit
    assert config.workers.max <= most
    autoscaled = cluster_spec(overlay).get("enableInTreeAutoscaling", False)
    assert config.workers.autoscale == ("nodes" if autoscaled else "cores")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_requests_are_limits_and_cpus_are_whole(overlay: str) -> None:
    for name, template in templates(overlay):
        for container in containers(template):
            resources = copy.deepcopy(container["resources"])
            assert resources["requests"] == resources["limits"]
            if name != "submitter":
                assert quantity(resources["limits"]["cpu"]) == int(resources["limits"]["cpu"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_of_ray_is_probed_and_has_time_to_end(overlay: str) -> None:
    for name, group in groups(overlay).items():
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            if asked["path"] == "/healthz":
                assert (name, asked["port"], asked["scheme"]) == ("coordinator", "https", "HTTPS")
                assert asked["port"] in ports
            elif asked["path"] == "/api/local_raylet_healthz":
                agent = group["rayStartParams"]["dashboard-agent-listen-port"]
                assert asked["port"] == int(agent)
            else:
                assert (name, asked["path"]) == ("head", "/api/gcs_healthz")
        if name in DATA:
            command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            (timeout_s,) = re.findall(r"--timeout-s (\d+)", command)
            assert spec["terminationGracePeriodSeconds"] >= int(timeout_s) + 60
            (service,) = of_kind(built(overlay), "Service")
            assert f"drain {service['metadata']['name']}:7070 --node" in command


def test_a_run_reads_the_config_of_the_default_layout(tmp_path: Path) -> None:
    assert config_of("run", tmp_path) == config_of("disaggregated", tmp_path)
