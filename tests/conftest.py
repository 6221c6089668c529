"""What every test gets: quiet Ray, no proxy, and no leftover settings of the developer's shell."""

from __future__ import annotations

import os

import pytest

from dataservice.actors.ray_local import ray_environment

ray_environment()  # Ray reads it when it is imported, as adapters of trainers do


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("RAY_ADDRESS", "DEMO_DIR", "http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in [
        one for one in os.environ if one.startswith(("DATASERVICE_TLS", "DATASERVICE_TOK"))
    ]:
        monkeypatch.delenv(name)
