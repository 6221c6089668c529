"""deploy/vm's files for Ray's cluster launcher, against the schema that Ray checks them with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dataservice.config.schema import WorkersSection

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "vm"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "autoscaler" / "ray-schema.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", ["cluster.yaml", "cloud.yaml"])
def test_the_launchers_files_are_what_ray_takes(name: str, schema: dict[str, Any]) -> None:
    config = yaml.safe_load((FOLDER / name).read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"zzz": 1}, schema)


@pytest.mark.parametrize("name", ["cluster.yaml", "cloud.yaml"])
def test_every_node_asks_for_the_token_and_sends_no_report(name: str) -> None:
    config = yaml.safe_load((FOLDER / name).read_text())
    (token,) = config["file_mounts"]
    starts = [
        command
        for kind in ("head", "worker")
        for command in config[f"{kind}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        assert f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}" in command
        assert "RAY_USAGE_STATS_ENABLED=0" in command
    assert "--include-dashboard=false" in starts[0]


def test_data_nodes_are_marked_by_the_default_resource() -> None:
    resource = WorkersSection.model_fields["resource"].default
    cloud = yaml.safe_load((FOLDER / "cloud.yaml").read_text())
    assert resource in cloud["available_node_types"]["data"]["resources"]
    local = (FOLDER / "cluster.yaml").read_text()
    assert local.count(f"""--resources='{{"{resource}": 1}}'""") == 2
