"""`dataservice serve` on Ray, as monitoring sees it: metrics of every actor, and logs as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.demo_config import demo_settings, write_config
from support.harness import read_ranks
from support.scrape import get, get_json, one, samples_of
from support.service_processes import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_serve_is_observed(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, demo_settings(tmp_path, serving={"http_port": port}))
    output, errors = tmp_path / "out", tmp_path / "err"
    command = ["-m", "dataservice.cli", "serve", str(config), "--log-format", "json"]
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=err,
            env={**os.environ, "DATASERVICE_LOG": "INFO"},
        )
    try:
        endpoint = waited_for(r"serving on (\S+)", output, process, errors)
        readers = read_ranks(endpoint, job="test", dp_size=1, micro_steps=2, steps=4)
        assert readers.deliveries
        targets = get_json(f"http://127.0.0.1:{port}/sd")
        for target in targets:
            role = target["labels"]["role"]
            found = samples_of(get(f"http://{target['targets'][0]}/metrics").decode(), role)
            assert one(found, "build_info", role=role, version=version_of(found)) == 1
        assert sorted(t["labels"]["role"] for t in targets) == ["stager", "worker"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, errors.read_text()
    logged = (output.read_text() + errors.read_text()).splitlines()
    found = [json.loads(line[line.index('{"time"') :]) for line in logged if '{"time"' in line]
    assert {line["job"] for line in found} == {"test"}
    joined = [line for line in found if line["message"].startswith("stager joined")]
    assert [line["role"] for line in joined] == ["coordinator"]


def version_of(found: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> str:
    (labels,) = found["dataservice_build_info"]
    return dict(labels)["version"]


def waited_for(pattern: str, output: Path, process: subprocess.Popen[bytes], errors: Path) -> str:
    end = time.monotonic() + 200
    while (match := re.search(pattern, output.read_text())) is None:
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < end, "it does not come up"
        time.sleep(0.2)
    return match[1]
