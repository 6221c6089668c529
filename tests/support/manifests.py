"""The manifests of deploy/k8s as they would be applied, and their parts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.kustomize import Resource, build

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("disaggregated", "colocated", "embedded", "run")


@functools.cache
def _built(overlay: str) -> list[Resource]:
    return build(K8S / "overlays" / overlay)


def built(overlay: str) -> list[Resource]:
    return copy.deepcopy(_built(overlay))


def of_kind(resources: list[Resource], kind: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] == kind]


def ray_resource(overlay: str) -> Resource:
    """The RayCluster or RayJob; there is one."""
    (found,) = (r for r in built(overlay) if r["apiVersion"].startswith("ray.io/"))
    return found


def cluster_spec(overlay: str) -> Any:
    spec = ray_resource(overlay)["spec"]
    return spec.get("rayClusterSpec", spec)


def groups(overlay: str) -> dict[str, Any]:
    """Head and worker groups by name."""
    spec = cluster_spec(overlay)
    workers = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"], **workers}


def templates(overlay: str) -> Iterator[tuple[str, Any]]:
    """Of every pod, by the name of its group, and `submitter`."""
    for name, group in groups(overlay).items():
        yield name, group["template"]
    submitter = ray_resource(overlay)["spec"].get("submitterPodTemplate")
    if submitter is not None:
        yield "submitter", submitter


def containers(template: Any) -> list[Any]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


_UNITS = {"": 1, "m": 0.001, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def quantity(text: str) -> float:
    """As Kubernetes reads it: bytes, or CPUs."""
    digits = text.rstrip("mKMGTi")
    return float(digits) * _UNITS[text[len(digits) :]]
