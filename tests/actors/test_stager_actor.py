"""The stager's actor: under which name of a host it joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.demo_config import demo_config

from dataservice.actors.ray_actors import StagerActor
from dataservice.config import config_to_json
from dataservice.obs.logs import Logs


@pytest.mark.parametrize(
    ("named", "host"), [(None, "pod-7f"), ("", "pod-7f"), ("node-1", "node-1")]
)
def test_a_node_may_be_named_as_trainers_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, host: str
) -> None:
    monkeypatch.setattr(Logs, "install", lambda *_, **__: None)
    if named is None:
        monkeypatch.delenv("DATASERVICE_HOST", raising=False)
    else:
        monkeypatch.setenv("DATASERVICE_HOST", named)
    actor = StagerActor(
        coordinator="127.0.0.1:1",
        node="node",
        host="pod-7f",
        config_json=config_to_json(demo_config(tmp_path)),
        logs=Logs(),
        still_s=1.0,
    )
    assert actor._stager._hello().host == host
