"""dataservice.rpc.security: token files, hosts, and what the environment names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.certificates import TOKEN, replace_file

from dataservice.errors import ConfigError
from dataservice.rpc.security import (
    MAX_TOKEN_FILE_BYTES,
    ClientSecurity,
    ServerSecurity,
    Tls,
    TokenFile,
    check_reachable,
    is_loopback,
)

OTHER = "f" * 32
TLS = Tls(cert_file="c", key_file="k", ca_file="a", mutual=True, server_name="n")


def token_file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "token"
    replace_file(path, data)
    return path


def test_the_first_token_is_shown_and_each_is_taken(tmp_path: Path) -> None:
    tokens = TokenFile(str(token_file(tmp_path, f"  {TOKEN}\r\n\n{OTHER}".encode())))
    assert tokens.token == TOKEN
    assert [tokens.matches(given) for given in (TOKEN, OTHER, "", TOKEN + OTHER)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("data", [b"", b"\n \n", b"short", TOKEN.encode() + b"\nshort"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"at least 16 ASCII.*`openssl rand -hex 32`"):
        TokenFile(str(token_file(tmp_path, data)))


@pytest.mark.parametrize(
    "data", [b"with a space in it", b"\xff" * 32, b"x" * (MAX_TOKEN_FILE_BYTES + 1)]
)
def test_what_is_no_token_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="ASCII characters, one a line, in at most 4096 bytes"):
        TokenFile(str(token_file(tmp_path, data)))


def test_a_file_that_cannot_be_used_any_more_leaves_what_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = token_file(tmp_path, TOKEN.encode())
    tokens = TokenFile(str(path))
    with caplog.at_level(logging.WARNING):
        replace_file(path, b"short")
        assert tokens.matches(TOKEN)
        assert not tokens.matches("short")
    assert "what it held before holds on" in caplog.text
    path.unlink()
    assert tokens.token == TOKEN
    replace_file(path, OTHER.encode())
    assert tokens.token == OTHER
    assert not tokens.matches(TOKEN)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.test", False),
        ("", False),
    ],
)
def test_hosts_that_no_other_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    ("security", "missing"),
    [
        (ServerSecurity(), "set serving.tls and serving.token_file, or"),
        (ServerSecurity(tls=TLS), "set serving.token_file, or"),
        (ServerSecurity(token_file="t"), "set serving.tls, or"),
        (ServerSecurity(tls=TLS, token_file="t"), None),
        (ServerSecurity(insecure=True), None),
    ],
)
def test_a_host_that_others_reach_needs_both(security: ServerSecurity, missing: str | None) -> None:
    check_reachable("bind: x", "127.0.0.1", security)
    if missing is None:
        check_reachable("bind: x", "10.0.0.1", security)
        return
    with pytest.raises(ConfigError, match=f"^bind: x is reachable.*{missing}.*--insecure"):
        check_reachable("bind: x", "10.0.0.1", security)


def test_a_member_shows_the_files_of_its_service() -> None:
    assert ClientSecurity.of_member(ServerSecurity(tls=TLS, token_file="t")) == ClientSecurity(
        tls=True, ca_file="a", cert_file="c", key_file="k", server_name="n", token_file="t"
    )
    plain = ClientSecurity.of_member(ServerSecurity(token_file="t"))
    assert plain == ClientSecurity(token_file="t")
    assert not plain.uses_tls


def test_the_environment_names_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientSecurity.from_environment() == ClientSecurity()
    monkeypatch.setenv("DATASERVICE_TLS", "0")
    monkeypatch.setenv("DATASERVICE_TLS_CA", "")
    assert not ClientSecurity.from_environment().uses_tls
    monkeypatch.setenv("DATASERVICE_TLS_CA", "ca.pem")
    monkeypatch.setenv("DATASERVICE_TOKEN_FILE", "token")
    found = ClientSecurity.from_environment()
    assert found == ClientSecurity(ca_file="ca.pem", token_file="token")
    assert found.uses_tls
    assert found.tls_files == ("ca.pem",)
