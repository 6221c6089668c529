"""Who may speak to a service, and how each side proves it: TLS, client certificates, a token.

Invariants: imports no gRPC, so that settings can name it; secrets are in files, never in a setting;
a file that changed is read again, and one that cannot be read keeps what was read before.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataservice.errors import ConfigError

__all__ = [
    "ClientSecurity",
    "FileChanges",
    "ServerSecurity",
    "Tls",
    "TokenFile",
    "check_pair",
    "check_reachable",
    "is_loopback",
    "server_ssl_context",
]


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Paths of PEM files; the same ones at the coordinator and its workers."""

    cert_file: str
    """Of this end, with its chain."""
    key_file: str
    ca_file: str | None
    """Who signs the other end's; None: who the machine trusts."""
    mutual: bool
    """Clients must show a certificate that `ca_file` signed."""
    server_name: str | None
    """That servers' certificates are for, where it is not the host that one connects to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSecurity:
    tls: Tls | None = None
    token_file: str | None = None
    insecure: bool = False
    """Allows others than loopback without TLS and token."""


def is_loopback(host: str) -> bool:
    """`host` may be a v6 address in brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_reachable(where: str, host: str, security: ServerSecurity) -> None:
    """ConfigError for a `host` beyond loopback without TLS and token, unless `security.insecure`;
    `where` is the setting and its value, for the text."""
    missing = [
        name
        for name, given in (
            ("serving.tls", security.tls),
            ("serving.token_file", security.token_file),
        )
        if given is None
    ]
    if missing and not security.insecure and not is_loopback(host):
        raise ConfigError(
            f"{where} is reachable from other machines, and whoever reaches it reads the data: "
            f"set {' and '.join(missing)}, or use 127.0.0.1, or say --insecure "
            "(serving.insecure: true) if the network is private"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSecurity:
    """What a client connects with; all None: in plain text, without a token."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    token_file: str | None = None
    tls: bool = False
    """Also without `ca_file`: who the machine trusts."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(
                f"client certificate {self.cert_file}, its key {self.key_file}: give both "
                "(--cert and --key; DATASERVICE_TLS_CERT and DATASERVICE_TLS_KEY), or neither"
            )

    @property
    def uses_tls(self) -> bool:
        return self.tls or self.ca_file is not None or self.cert_file is not None

    @property
    def tls_files(self) -> tuple[str, ...]:
        files = (self.ca_file, self.cert_file, self.key_file)
        return tuple(path for path in files if path is not None)

    @classmethod
    def from_environment(cls) -> ClientSecurity:
        """DATASERVICE_TLS_CA, _TLS_CERT, _TLS_KEY, _TLS_SERVER_NAME, DATASERVICE_TOKEN_FILE, and
        DATASERVICE_TLS=1 for TLS with the machine's own authorities."""
        given = {
            name: os.environ.get(f"DATASERVICE_{variable}") or None
            for name, variable in (
                ("ca_file", "TLS_CA"),
                ("cert_file", "TLS_CERT"),
                ("key_file", "TLS_KEY"),
                ("server_name", "TLS_SERVER_NAME"),
                ("token_file", "TOKEN_FILE"),
            )
        }
        return cls(tls=os.environ.get("DATASERVICE_TLS", "") not in ("", "0"), **given)

    @classmethod
    def of_member(cls, server: ServerSecurity) -> ClientSecurity:
        """What a worker or stager connects to its coordinator with: the service's own files."""
        tls = server.tls
        if tls is None:
            return cls(token_file=server.token_file)
        return cls(
            tls=True,
            ca_file=tls.ca_file,
            cert_file=tls.cert_file,
            key_file=tls.key_file,
            server_name=tls.server_name,
            token_file=server.token_file,
        )


class FileChanges:
    """Whether any of some files is another than when it was last asked."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._seen: tuple[tuple[int, int, int], ...] = ()

    def look(self) -> bool:
        """True the first time. What cannot be looked at counts as unchanged."""
        try:
            now = tuple(_identity(os.stat(path)) for path in self._paths)
        except OSError:
            return False
        changed = now != self._seen
        self._seen = now
        return changed


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_ino, found.st_size


MIN_TOKEN_BYTES = 16
MAX_TOKEN_FILE_BYTES = 4096


class TokenFile:
    """Bearer tokens in a file, one a line: the first is shown, each of them is taken, so that a
    token can be changed while clients still show the old one."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be read, or holds no token."""
        self.path = Path(path)
        self._changes = FileChanges((path,))
        self._changes.look()
        self._tokens = self._read()

    @property
    def token(self) -> str:
        self._refresh()
        return self._tokens[0].decode()

    def matches(self, given: str) -> bool:
        """In a time that does not depend on where they differ."""
        self._refresh()
        shown = given.encode("utf-8", "surrogateescape")
        matching = [token for token in self._tokens if hmac.compare_digest(shown, token)]
        return bool(matching)

    def _refresh(self) -> None:
        if self._changes.look():
            try:
                self._tokens = self._read()
            except ConfigError as error:
                _LOG.warning("%s; what it held before holds on", error)

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_TOKEN_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"token_file {self.path}: cannot be read ({error.strerror}); a token is made by "
                "`openssl rand -hex 32`"
            ) from None
        tokens = tuple(line.strip() for line in data.splitlines() if line.strip())
        shortest = min(map(len, tokens), default=0)
        is_text = all(33 <= byte <= 126 for token in tokens for byte in token)
        if shortest < MIN_TOKEN_BYTES or not is_text or len(data) > MAX_TOKEN_FILE_BYTES:
            raise ConfigError(
                f"token_file {self.path}: should hold tokens of at least {MIN_TOKEN_BYTES} ASCII "
                f"characters, one a line, in at most {MAX_TOKEN_FILE_BYTES} bytes; one is made by "
                "`openssl rand -hex 32`"
            )
        return tokens


def server_ssl_context(tls: Tls) -> ssl.SSLContext:
    """For HTTP, which asks nobody for a certificate: probes and browsers have none, and the token
    keeps out who should not read. A renewed certificate is shown from the next handshake on. Raises
    ConfigError for files that cannot be used."""
    context = _ssl_context(tls)
    changes = FileChanges((tls.cert_file, tls.key_file))
    changes.look()
    shown = context

    def greeted(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal shown
        if changes.look():
            try:
                shown = _ssl_context(tls)
            except ConfigError as error:
                _LOG.warning("%s; the certificate of before is shown", error)
        connection.context = shown

    context.sni_callback = greeted
    return context


def _ssl_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    check_pair(context, tls.cert_file, tls.key_file)
    return context


def check_pair(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """ConfigError unless they are a certificate and its key, which `context` shows from then on."""
    try:
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cert_file {cert_file}, key_file {key_file}: cannot be used: {error}; they are PEM "
            "files of one certificate and its key, without a password"
        ) from None
