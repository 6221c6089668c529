"""deploy/README.md: what it names is there, and its certificate is one."""

from __future__ import annotations

import re
import shlex
import ssl
from pathlib import Path

import typer.main
from support.deploy_readme import DEPLOY, README, blocks, make_secrets

from dataservice.cli.app import app
from dataservice.rpc.security import Tls, TokenFile, server_ssl_context


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Both ends in memory; raises what either refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].version() is not None


def test_its_commands_make_a_certificate_and_a_token(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    files = Tls(
        cert_file=str(tmp_path / "tls.crt"),
        key_file=str(tmp_path / "tls.key"),
        ca_file=str(tmp_path / "ca.crt"),
        mutual=False,
        server_name="dataservice",
    )
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it
    client.load_cert_chain(files.cert_file, files.key_file)
    handshake(server_ssl_context(files), client, "dataservice")
    assert len(TokenFile(str(tmp_path / "token")).token) == 64


def test_what_it_names_is_there() -> None:
    for path in re.findall(r"`((?:overlays|base|k8s|deploy|tests)/[\w./-]+)`", README):
        places = (DEPLOY / path, DEPLOY / "k8s" / path, DEPLOY.parent / path)
        assert any(place.exists() for place in places), path
    for line in "".join(blocks("text")).splitlines():
        words = shlex.split(line, comments=True)
        for option in ("-f", "-k"):
            if words[0] in ("docker", "kubectl") and option in words[:-1]:
                named = words[words.index(option) + 1]
                assert named == "-l" or (DEPLOY.parent / named).exists(), line


def test_commands_of_ours_are_there() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`dataservice\s+([a-z-]+)", README))
    assert {"serve", "status"} <= named
    assert named <= known | {"bench", "drain"}
