"""`dataservice doctor`: what it thinks of what it finds, and the command on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from support.command import run
from support.demo_config import demo_settings, write_config

from dataservice.cli import (
    disk_speed,
    doctor_config,
    doctor_disks,
    doctor_machine,
    doctor_run,
    doctor_software,
)
from dataservice.cli.doctor_finding import Finding
from dataservice.config import Config, load_config
from dataservice.rpc.security import Tls


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(str(write_config(tmp_path, demo_settings(tmp_path))))


def serving(**parts: Any) -> Any:
    given = {
        "host": "127.0.0.1",
        "port": 0,
        "http_port": None,
        "tls": None,
        "token_file": None,
        "insecure": False,
    }
    return SimpleNamespace(**given | parts)


def test_what_is_not_well_comes_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "warning", "bad")
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "ok", "good", "do something")


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look", "level", "words"),
    [
        (lambda: doctor_machine.system("Linux", "x86_64"), "ok", "Linux"),
        (lambda: doctor_machine.system("Darwin", "arm64"), "problem", "Darwin"),
        (lambda: doctor_machine.cores_of(8, None, None), "ok", "8; workers that they take: 4"),
        (lambda: doctor_machine.cores_of(8, 7.8, None), "ok", "8"),
        (lambda: doctor_machine.cores_of(8, 2.0, None), "warning", "gets 2 at a time"),
        (lambda: doctor_machine.open_files(1024, 4096), "warning", "at most 1,024"),
        (lambda: doctor_machine.open_files(8192, 8192), "ok", "8,192"),
        (lambda: doctor_machine.open_files(-1, -1), "ok", "no limit"),
        (lambda: doctor_machine.clock(True, 1e-7, time.time()), "ok", "UTC"),
        (lambda: doctor_machine.clock(None, 1e-7, time.time()), "ok", "UTC"),
        (lambda: doctor_machine.clock(False, 1e-7, time.time()), "warning", "nobody keeps it"),
        (lambda: doctor_machine.clock(True, 5e-6, time.time()), "warning", "takes 5.0 us"),
        (lambda: doctor_machine.clock(True, 1e-7, 0.0), "problem", "1970-01-01"),
        (lambda: doctor_machine.host_name("localhost"), "ok", "localhost is 127.0.0.1"),
        (lambda: doctor_machine.shared_memory("/nonexistent"), "problem", "No such file"),
    ],
)
def test_of_the_machine(look: Callable[[], Finding], level: str, words: str) -> None:
    finding = look()
    assert finding.level == level
    assert words in finding.words


def test_the_remedy_for_open_files_is_no_more_than_may_be_had() -> None:
    assert "ulimit -n 4096" in doctor_machine.open_files(1024, 4096).remedy
    assert "ulimit -n 8192" in doctor_machine.open_files(1024, -1).remedy


def test_small_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=64 << 20, total=64 << 20)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: usage)
    finding = doctor_machine.shared_memory("/dev/shm")
    assert finding.level == "warning"
    assert "--shm-size" in finding.remedy


def test_packs_that_do_not_fit_the_memory_are_said(config: Config) -> None:
    assert doctor_machine.memory(1 << 30, 2, config).level == "ok"
    finding = doctor_machine.memory(1 << 20, 2, config)
    assert finding.level == "warning"
    assert "67.1 MB of it for built packs" in finding.words


def test_a_host_name_that_nobody_knows_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "SLOW_NAME_S", 0.1)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: time.sleep(0.5) or "1.2.3.4")
    finding = doctor_machine.host_name("here")
    assert (finding.level, "no answer within 0.1 s" in finding.words) == ("warning", True)


# ---- software ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10, 9), "problem"), ((3, 11, 0), "ok"), ((3, 13, 2), "ok"), ((3, 14, 0), "problem")],
)
def test_of_python(version: tuple[int, ...], level: str) -> None:
    assert doctor_software.python(version).level == level


def test_packages_that_lack_or_are_old_are_named() -> None:
    there = {"numpy": "2.1.0", "ray": "2.40.1", "isal": "1.6"}
    wanted = ["numpy", "ray>=2.52", "isal>=1.6", "moto[s3]>=5"]
    finding = doctor_software.packages(wanted, there.get)
    assert finding.level == "problem"
    assert finding.words == "lacking: moto; too old: ray 2.40.1 (at least 2.52)"
    assert doctor_software.packages(wanted[:1], there.get).level == "ok"
    assert doctor_software.packages([], there.get).level == "warning"


def test_the_requirements_are_those_of_the_service() -> None:
    wanted = doctor_software._requirements()
    assert "torch" in wanted
    assert any(name.startswith("ray>=") for name in wanted)
    assert not any(name.startswith("pytest") for name in wanted)


@pytest.mark.parametrize(
    ("version", "environment", "level", "words"),
    [
        (None, {}, "problem", "not installed"),
        ("2.40.0", {}, "problem", "2.40.0"),
        ("2.60.0", {}, "ok", "a token of its own"),
        ("2.60.0", {"RAY_AUTH_MODE": "disabled"}, "warning", "runs code on it"),
        ("2.60.0", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}, "ok", "the token"),
        ("2.60.0", {"RAY_AUTH_TOKEN_PATH": "/none"}, "problem", "cannot be read"),
    ],
)
def test_of_ray(version: str | None, environment: dict[str, str], level: str, words: str) -> None:
    finding = doctor_software.ray(version, environment)
    assert finding.level == level
    assert words in finding.words
    assert "s3cret" not in finding.words


@pytest.mark.parametrize(
    ("text", "mode", "level"),
    [("s3cret", 0o600, "ok"), ("s3cret", 0o644, "warning"), ("\n", 0o600, "problem")],
)
def test_of_rays_token(
    tmp_path_factory: pytest.TempPathFactory, text: str, mode: int, level: str
) -> None:
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(text)
    path.chmod(mode)
    found = doctor_software.ray("2.60.0", {"RAY_AUTH_TOKEN_PATH": str(path)})
    assert found.level == level
    assert "s3cret" not in found.words


# ---- disks ---------------------------------------------------------------------------------------


def test_of_a_disk_and_nothing_stays_on_it(tmp_path: Path) -> None:
    speed = disk_speed.sequential(str(tmp_path), most_bytes=10 << 20, most_s=5.0)
    assert speed.written_bytes == 10 << 20
    assert speed.write_bytes_per_s > 1e6
    assert speed.read_bytes_per_s > 1e6
    assert 1 <= len(disk_speed.sync_times(str(tmp_path), count=3, most_s=5.0)) <= 3
    assert len(disk_speed.sync_times(str(tmp_path), count=9, most_s=0.0)) == 1
    assert disk_speed.file_system("/proc") == "proc"
    assert disk_speed.file_system("/dev/shm/x") == "tmpfs"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "rate", "budget", "level", "words"),
    [
        ("ext4", 1e9, None, "ok", "writes 1.0 GB/s"),
        ("ext4", 1e9, 1 << 60, "warning", "staging.budget_bytes is"),
        ("ext4", 1e8, None, "warning", "slow"),
        ("tmpfs", 1e9, None, "warning", "it is memory"),
        ("nfs4", 1e9, None, "warning", "on the network"),
    ],
)
def test_of_the_cache_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rate: float,
    budget: int | None,
    level: str,
    words: str,
) -> None:
    speed = disk_speed.Speed(written_bytes=1, write_bytes_per_s=rate, read_bytes_per_s=rate)
    monkeypatch.setattr(disk_speed, "sequential", lambda *_, **__: speed)
    monkeypatch.setattr(disk_speed, "file_system", lambda _: kind)
    finding = doctor_disks.cache_disk(str(tmp_path), budget_bytes=budget, field="f")
    assert finding.level == level
    assert words in finding.words


@pytest.mark.parametrize(
    ("kind", "seconds", "level"),
    [("ext4", 0.001, "ok"), ("ext4", 0.2, "warning"), ("tmpfs", 0.0, "warning")],
)
def test_of_the_state_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seconds: float, level: str
) -> None:
    monkeypatch.setattr(disk_speed, "sync_times", lambda *_, **__: [seconds] * 3)
    monkeypatch.setattr(disk_speed, "file_system", lambda _: kind)
    assert doctor_disks.state_disk(str(tmp_path / "s"), field="state_dir").level == level


def test_a_folder_that_cannot_be_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "file" / "x")
    assert doctor_disks.cache_disk(wrong, budget_bytes=None, field="f").level == "problem"
    assert doctor_disks.state_disk(wrong, field="f").level == "problem"


# ---- what a config names -------------------------------------------------------------------------


def test_of_the_demos_data(config: Config) -> None:
    found = {finding.name: finding for finding in doctor_config.config_findings(config)}
    assert {finding.level for finding in found.values()} == {"ok"}
    assert "archives and folders of images 1" in found["source multi"].words
    assert "index" in found and "tokenizer" in found


def test_data_that_is_not_there_or_may_not_be_read(tmp_path: Path) -> None:
    settings = demo_settings(tmp_path)
    settings["sources"][0]["records"] = str(tmp_path / "none-*.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    settings["sources"] += [
        {
            "name": "odd",
            "records": [settings["sources"][1]["records"], str(tmp_path / "gone.jsonl")],
        }
    ]
    path = write_config(tmp_path, settings)
    found = {f.name: f for f in doctor_config.config_findings(load_config(str(path)))}
    assert found["source text"].level == "problem"
    assert "no file matches" in found["source text"].words
    assert found["source odd"].level == "problem"


def test_of_who_may_connect(tmp_path: Path) -> None:
    def levels(part: Any) -> dict[str, str]:
        return {f.name: f.level for f in doctor_config.security(part)}

    assert levels(serving()) == {}
    assert levels(serving(host="0.0.0.0")) == {"who may connect": "problem"}
    assert levels(serving(host="0.0.0.0", insecure=True)) == {"who may connect": "warning"}
    token = tmp_path / "token"
    assert levels(serving(token_file=str(token))) == {"token": "problem"}
    token.write_text("a" * 64)
    token.chmod(0o644)
    assert levels(serving(token_file=str(token))) == {"token": "warning"}
    token.chmod(0o600)
    assert levels(serving(token_file=str(token))) == {"token": "ok"}
    one, other = (trustme.CA().issue_cert("127.0.0.1") for _ in range(2))
    names = {"cert": one.cert_chain_pems[0], "key": one.private_key_pem}
    for name, pem in names.items():
        pem.write_to_path(tmp_path / name)
        (tmp_path / name).chmod(0o600)
    tls = Tls(
        cert_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        ca_file=None,
        mutual=False,
        server_name=None,
    )
    assert levels(serving(tls=tls)) == {"certificate": "ok"}
    other.private_key_pem.write_to_path(tmp_path / "key")
    assert levels(serving(tls=tls)) == {"certificate": "problem"}


def test_of_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = doctor_config.ports(serving(port=port))
        assert (found.level, f"127.0.0.1:{port}" in found.words) == ("problem", True)
        found = list(doctor_config.ports(serving(port=port - 1, http_port="auto")))[1]
        assert found.level == "warning"  # the service takes another
        found = list(doctor_config.ports(serving(http_port=port)))[1]
        assert found.level == "problem"
    for host in ("192.0.2.1", "no.such.host.invalid"):
        (found,) = doctor_config.ports(serving(host=host, port=port))
        assert (found.level, "address of this machine" in found.remedy) == ("problem", True)
    (found,) = doctor_config.ports(serving(port=port))
    assert found.level == "ok"
    (found,) = doctor_config.ports(serving())
    assert found.level == "ok"


# ---- the command ---------------------------------------------------------------------------------


def test_it_is_clean_on_this_machine_but_for_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_disks, "MOST_BYTES", 16 << 20)
    path = write_config(tmp_path, demo_settings(tmp_path))
    assert run("doctor", path, "--json") == 0, capsys.readouterr().out
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    names = {finding["name"] for finding in told["findings"]}
    assert {"cores", "Ray", "decoders", "cache disk", "state disk", "port", "clock"} <= names
    assert {"shared memory", "open files", "source text", "tokenizer"} <= names
    assert all(f["remedy"] for f in told["findings"] if f["level"] != "ok")
    assert run("doctor", path) == 0
    assert "problems: 0" in capsys.readouterr().out


def test_a_wrong_config_is_a_problem_and_the_machine_is_looked_at_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_disks, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(doctor_run, "ports", lambda *_: [])
    path = tmp_path / "run.yaml"
    path.write_text("jbo: x\n")
    assert run("doctor", path) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "jbo: unknown key; did you mean job?" in out
    assert "shared memory" in out
    assert "problems: 1" in out


def test_a_look_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("no such register")

    monkeypatch.setattr(doctor_run, "software_findings", broken)
    monkeypatch.setattr(doctor_disks, "MOST_BYTES", 1 << 20)
    found = {f.name: f for f in doctor_run.findings_of(None, cache_dir=None, state_dir=None)}
    assert found["software"].level == "problem"
    assert "RuntimeError: no such register" in found["software"].words
    assert "state disk" in found


def test_it_imports_no_ray() -> None:
    code = "import dataservice.cli.doctor_run, sys; print('ray' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.split() == ["False"]


def test_a_full_cache_disk_is_named_so_and_not_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(total=1, used=1, free=0)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    finding = doctor_disks.cache_disk(str(tmp_path), budget_bytes=None, field="f")
    assert finding.level == "warning" and "is full (0 bytes free)" in finding.words
    assert "make room" in finding.remedy
