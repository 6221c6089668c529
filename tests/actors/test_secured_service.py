"""A whole service with TLS, client certificates and a token: coordinator, workers, stager, ranks,
and what strangers get from each of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.certificates import TOKEN, Authority
from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.cli import main
from dataservice.errors import AccessRefused
from dataservice.rpc.client import DataClient
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.messages import StreamPack
from trainer_client import PackStream, ParallelLayout

NAME = "packs.test"
"""That the certificates of all servers are for."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def service(tmp_path: Path, authority: Authority) -> Iterator[LocalService]:
    cert, key = authority.issue("server", NAME)
    tls = {
        "cert_file": cert,
        "key_file": key,
        "ca_file": authority.ca_file,
        "mutual": True,
        "server_name": NAME,
    }
    token_file = authority.token(TOKEN)
    config = demo_config(tmp_path, serving={"tls": tls, "token_file": token_file})
    with LocalService(config, workers=2) as service:
        yield service


@pytest.fixture
def shown(authority: Authority) -> ClientSecurity:
    return replace(authority.client("rank", token=TOKEN), server_name=NAME)


def stream_of(service: LocalService, security: ClientSecurity | None) -> PackStream:
    return PackStream(
        service.endpoint,
        job="test",
        layout=ParallelLayout(),
        micro_steps=2,
        run_id="run",
        local=False,
        security=security,
        timeout_s=60.0,
    )


def endpoint_of_a_worker(service: LocalService) -> str:
    """Once one has joined."""
    until = time.monotonic() + 30.0
    while not (workers := service.status().get("workers")):
        assert time.monotonic() < until
        time.sleep(0.05)
    endpoint: str = workers[0]["endpoint"]
    return endpoint


def test_packs_come_over_tls(
    service: LocalService, shown: ClientSecurity, authority: Authority
) -> None:
    """Also after the certificates are renewed and the token is another."""
    with stream_of(service, shown) as stream:
        batches = iter(stream)
        for _ in range(4):
            next(batches)
        authority.issue("server", NAME)
        authority.issue("rank")
        authority.token(f"{TOKEN}\n{'f' * 32}")
        authority.token("f" * 32, "client.token")
        service.stop_coordinator()
        service.start_coordinator()
        endpoint_of_a_worker(service)
        for _ in range(40):
            next(batches)
        assert stream.stats().local_packs == 0


@pytest.mark.parametrize("lacks", ["the token", "the certificate", "the name"])
def test_a_trainer_that_is_refused_ends_soon_and_says_why(
    service: LocalService, shown: ClientSecurity, lacks: str
) -> None:
    wrong, words = {
        "the token": (replace(shown, token_file=None), "DATASERVICE_TOKEN_FILE"),
        "the certificate": (replace(shown, cert_file=None, key_file=None), "--cert and --key"),
        "the name": (replace(shown, server_name=None), "--server-name"),
    }[lacks]
    started = time.monotonic()
    with stream_of(service, wrong) as stream, pytest.raises(AccessRefused, match=words):
        stream.open()
    assert time.monotonic() - started < 10.0


def test_a_worker_gives_no_pack_to_strangers(service: LocalService, shown: ClientSecurity) -> None:
    endpoint = endpoint_of_a_worker(service)
    request = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=0.1)
    for wrong in (
        ClientSecurity(),
        replace(shown, cert_file=None, key_file=None),
        replace(shown, token_file=None),
    ):
        with DataClient(endpoint, wrong) as client, pytest.raises(AccessRefused):
            next(client.stream_pack(request, 10.0))


def test_commands_show_what_their_options_name(
    service: LocalService, shown: ClientSecurity, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [shown.ca_file, shown.cert_file, shown.key_file, shown.token_file]
    assert None not in files
    options = [f"--{name}={file}" for name, file in zip(("ca", "cert", "key"), files, strict=False)]
    token = f"--token-file={shown.token_file}"
    for given, code in (
        ([*options, token, "--server-name", NAME], 0),
        ([*options, "--server-name", NAME], 2),
        ([*options, token], 2),
        ([], 2),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["status", service.endpoint, "--json", *given])
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        if code == 0:
            assert json.loads(out)["job"] == "test"
        else:
            assert err.startswith("error: ")
            assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "top", "drain", "scale"])
def test_a_command_that_is_refused_ends_at_once(
    service: LocalService, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main([command, service.endpoint, *["1"] * (command == "scale")])
    assert ended.value.code == 2
    assert "it speaks TLS, and this end plain text" in capsys.readouterr().err
    assert time.monotonic() - started < 10.0


def test_nothing_of_a_token_is_in_what_is_said(
    service: LocalService, shown: ClientSecurity, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["status", service.endpoint, "--token-file", str(shown.token_file)])
    out, err = capfd.readouterr()
    assert TOKEN not in out + err + json.dumps(service.status())
    assert not any(TOKEN in thread.name for thread in threading.enumerate())
