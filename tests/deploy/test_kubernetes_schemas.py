"""The manifests are what Kubernetes, KubeRay and Ray's autoscaler take, field by field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from support.kustomize import KustomizeError, apply_operation, build, documents
from support.manifests import (
    K8S,
    OVERLAYS,
    built,
    cluster_spec,
    containers,
    ray_resource,
    templates,
)

VERSIONS = ("1.30", "1.37")
RAY_CRDS = json.loads((Path(__file__).parent / "ray_crds.schema.json").read_text())


def as_pod(template: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", **template.get("metadata", {})},
        "spec": template["spec"],
    }


def check_ray(resource: Any) -> None:
    jsonschema.Draft202012Validator(RAY_CRDS).validate(resource)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_one_that_kubernetes_knows(overlay: str, version: str) -> None:
    for resource in built(overlay):
        if not resource["apiVersion"].startswith("ray.io/"):
            kubernetes_validate.validate(resource, version, strict=True)
    for _, template in templates(overlay):
        kubernetes_validate.validate(as_pod(template), version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_resources_have_the_fields_of_kuberay(overlay: str) -> None:
    check_ray(ray_resource(overlay))


def test_the_volume_by_hand_is_one() -> None:
    (volume,) = documents(K8S / "nvme-volume.yaml")
    kubernetes_validate.validate(volume, VERSIONS[0], strict=True)


@pytest.mark.parametrize("overlay", ["disaggregated", "run"])
def test_autoscaler_options_are_those_of_a_container(overlay: str) -> None:
    options = cluster_spec(overlay)["autoscalerOptions"]
    fields = ("resources", "securityContext", "volumeMounts")
    container = {"name": "autoscaler", "image": "image", **{f: options[f] for f in fields}}
    pod = as_pod({"spec": {"containers": [container]}})
    kubernetes_validate.validate(pod, VERSIONS[0], strict=True)
    mounted = {mount["name"] for mount in options["volumeMounts"]}
    head = cluster_spec(overlay)["headGroupSpec"]["template"]["spec"]
    assert mounted <= {volume["name"] for volume in head["volumes"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rays_autoscaler_reads_the_resources_of_each_group(overlay: str) -> None:
    """Its own code: the quotes in rayStartParams.resources are easily one too few."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr as derive,
    )

    metadata = {"name": "dataservice", "namespace": "dataservice"}
    types = derive({"metadata": metadata, "spec": cluster_spec(overlay)})["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert types["coordinator"]["resources"]["CPU"] == 0
    assert types["coordinator"]["resources"]["coordinator"] == 1
    data = types.keys() - {"headgroup", "coordinator"}
    assert (
        data
        == {
            "disaggregated": {"nvme", "decode"},
            "run": {"nvme", "decode"},
            "colocated": {"nvme"},
            "embedded": {"gpu"},
        }[overlay]
    )
    for name in data:
        assert types[name]["resources"]["nvme"] == 1
        assert types[name]["resources"]["CPU"] >= 16
    if overlay == "embedded":
        assert types["gpu"]["resources"]["GPU"] == 8


# ---- the checks themselves --------------------------------------------------------------------


def test_a_field_that_is_not_there_is_found() -> None:
    for _, template in templates("run"):
        wrong = copy.deepcopy(template)
        containers(wrong)[0]["readinesProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(as_pod(wrong), VERSIONS[0], strict=True)
    job = ray_resource("run")
    for place in (job["spec"], job["spec"]["rayClusterSpec"], job["metadata"]):
        place["replica"] = 1
        with pytest.raises(jsonschema.ValidationError):
            check_ray(job)
        del place["replica"]
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(jsonschema.ValidationError, match="0 is not of type 'string'"):
        check_ray(job)


def test_overlays_may_not_use_what_nobody_checks(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nreplacements: []\n")
    with pytest.raises(KustomizeError, match="replacements"):
        build(tmp_path)
    (tmp_path / "patch.yaml").write_text("- {op: replace, path: /a, value: 1}\n")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: []\npatches: [{path: patch.yaml, target: {kind: RayCluster}}]\n"
    )
    with pytest.raises(KustomizeError, match="no resource is"):
        build(tmp_path)


def test_json_patches_do_what_the_rfc_says() -> None:
    document: Any = {"a": {"b/c": [1, 3]}, "d": {}}
    for operation in (
        {"op": "add", "path": "/a/b~1c/1", "value": 2},
        {"op": "add", "path": "/a/b~1c/-", "value": 4},
        {"op": "remove", "path": "/a/b~1c/0"},
        {"op": "replace", "path": "/a/b~1c/0", "value": 9},
        {"op": "test", "path": "/a/b~1c/1", "value": 3},
        {"op": "add", "path": "/d/e", "value": {}},
    ):
        apply_operation(document, operation)
    assert document == {"a": {"b/c": [9, 3, 4]}, "d": {"e": {}}}
    for wrong in (
        {"op": "test", "path": "/a/b~1c/0", "value": 1},
        {"op": "replace", "path": "/d/f", "value": 1},
        {"op": "remove", "path": "/a/b~1c/3"},
        {"op": "move", "path": "/d/e", "from": "/a"},
    ):
        with pytest.raises(KustomizeError):
            apply_operation(document, wrong)
