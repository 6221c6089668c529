"""As much of kustomize as deploy/k8s uses, to see here what `kubectl apply -k` would send.

Invariants: a key, an operation or a kind of patch that is not known here is an error, so that the
overlays cannot use what nobody has checked; what is built shares nothing with the files' objects.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
KEYS = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "configMapGenerator",
    "generatorOptions",
    "patches",
}
CLUSTER_WIDE = {"Namespace", "StorageClass", "PersistentVolume"}


class KustomizeError(ValueError):
    """What kustomize would refuse, or this does not know."""


def build(folder: Path) -> list[Resource]:
    """The resources of a folder with a kustomization.yaml, in order."""
    wanted = _document(folder / "kustomization.yaml")
    if unknown := wanted.keys() - KEYS:
        raise KustomizeError(f"{folder}: {sorted(unknown)}: not known here")
    resources: list[Resource] = []
    for name in wanted.get("resources", []):
        path = folder / name
        resources += build(path) if path.is_dir() else documents(path)
    options = wanted.get("generatorOptions", {})
    for generated in wanted.get("configMapGenerator", []):
        resources.append(_config_map(folder, generated, options))
    for patch in wanted.get("patches", []):
        resources = _patched(resources, folder, patch)
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    if len(set(names)) < len(names):
        raise KustomizeError(f"{folder}: two resources of one kind and name in {names}")
    if "namespace" in wanted:
        for resource in resources:
            if resource["kind"] not in CLUSTER_WIDE:
                resource["metadata"]["namespace"] = wanted["namespace"]
    return resources


def documents(path: Path) -> list[Resource]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _document(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _config_map(folder: Path, generated: Any, options: Any) -> Resource:
    if generated.keys() - {"name", "files"} or options != {"disableNameSuffixHash": True}:
        raise KustomizeError(f"{folder}: {generated}, {options}: not known here")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generated["name"]},
        "data": {Path(name).name: (folder / name).read_text() for name in generated["files"]},
    }


def _patched(resources: list[Resource], folder: Path, patch: Any) -> list[Resource]:
    if patch.keys() - {"path", "target"}:
        raise KustomizeError(f"{folder}: {sorted(patch)}: not known here")
    content = _document(folder / patch["path"])
    if isinstance(content, dict):
        if content.pop("$patch", None) != "delete" or "target" in patch:
            raise KustomizeError(f"{patch['path']}: only `$patch: delete` and JSON patches")
        return _without(resources, content)
    matching = [r for r in resources if _matches(r, patch["target"])]
    if not matching:
        raise KustomizeError(f"{folder}: no resource is {patch['target']}")
    for resource in matching:
        for operation in content:
            apply_operation(resource, operation)
    return resources


def _without(resources: list[Resource], named: Resource) -> list[Resource]:
    def is_it(resource: Resource) -> bool:
        return all(resource[key] == named[key] for key in ("apiVersion", "kind")) and (
            resource["metadata"]["name"] == named["metadata"]["name"]
        )

    left = [resource for resource in resources if not is_it(resource)]
    if len(left) != len(resources) - 1:
        raise KustomizeError(f"{named['kind']} {named['metadata']['name']}: not there once")
    return left


def _matches(resource: Resource, target: Any) -> bool:
    if target.keys() - {"kind", "name"}:
        raise KustomizeError(f"target {target}: not known here")
    its = {"kind": resource["kind"], "name": resource["metadata"]["name"]}
    return all(its[key] == target[key] for key in target)


def apply_operation(document: Any, operation: Any) -> None:
    """One of RFC 6902: add, remove, replace or test, in place."""
    *way, last = [p.replace("~1", "/").replace("~0", "~") for p in operation["path"][1:].split("/")]
    place = document
    for step in way:
        place = place[_key(place, step)]
    what, value = operation["op"], copy.deepcopy(operation.get("value"))
    if what == "add" and isinstance(place, list):
        place.insert(len(place) if last == "-" else int(last), value)
        return
    if what == "add":
        place[last] = value
        return
    key = _key(place, last)
    if what == "remove":
        del place[key]
    elif what == "replace":
        place[key] = value
    elif what != "test":
        raise KustomizeError(f"{operation}: not known here")
    elif place[key] != value:
        raise KustomizeError(f"{operation['path']} is {place[key]!r}, not {value!r}")


def _key(place: Any, step: str) -> Any:
    key = int(step) if isinstance(place, list) else step
    there = key < len(place) if isinstance(place, list) else key in place
    if not there:
        raise KustomizeError(f"a patch looks for {step!r}, which is not there")
    return key
