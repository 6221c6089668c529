"""Who may speak to a service, and how each side proves it: TLS, client certificates, a token.

Invariants: imports no gRPC, so that settings can name it; secrets are in files, never in a setting;
a file that changed is read again, and one that cannot be read keeps what was read before.
"""

from __future__ import annotations

import hmac
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from dataservice.errors import ConfigError

__all__ = ["ClientSecurity", "ServerSecurity", "Tls", "TokenFile", "server_ssl_context"]


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
        tls = os.environ.get("DATASERVICE_TLS", "") not in ("", "0") or bool(given["ca_file"])
        return cls(tls=tls, **given)

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


MIN_TOKEN_BYTES = 16


class TokenFile:
    """A bearer token in a file, without the white space around it."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be read, or holds no token."""
        self.path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._token = b""
        self._refresh()
        if not self._token:
            raise ConfigError(
                f"token_file {path}: cannot be read; a token is made by `openssl rand -hex 32`"
            )

    @property
    def token(self) -> str:
        self._refresh()
        return self._token.decode()

    def matches(self, given: str) -> bool:
        """In a time that does not depend on where they differ."""
        self._refresh()
        return hmac.compare_digest(given.encode(), self._token)

    def _refresh(self) -> None:
        try:
            now = self.path.stat()
            seen = (now.st_mtime_ns, now.st_ino)
            if seen == self._seen:
                return
            token = self.path.read_bytes().strip()
        except OSError:
            return
        if len(token) < MIN_TOKEN_BYTES or not token.isascii():
            if self._token:
                return
            raise ConfigError(
                f"token_file {self.path}: should hold at least {MIN_TOKEN_BYTES} ASCII characters, "
                f"has {len(token)}; one is made by `openssl rand -hex 32`"
            )
        self._seen, self._token = seen, token


def server_ssl_context(tls: Tls) -> ssl.SSLContext:
    """For HTTP, which asks nobody for a certificate: probes and browsers have none, and the token
    keeps out who should not read. Raises ConfigError for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"serving.tls: cert_file {tls.cert_file}, key_file {tls.key_file}: cannot be used: "
            f"{error}"
        ) from error
    return context
