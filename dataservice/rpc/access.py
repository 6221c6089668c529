"""What either end of a gRPC channel shows of itself: certificates and tokens, from files.

Invariants: files that are renewed are used without a restart: by a server at the next handshake,
by a client at the next connection; ones that cannot be used leave those of before; a token goes
with every call, never into a log.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from dataservice.errors import AccessRefused, ConfigError, ServiceUnavailable
from dataservice.rpc.refusals import may_be_refusal, refusal
from dataservice.rpc.security import (
    ClientSecurity,
    FileChanges,
    Tls,
    TokenFile,
    check_pair,
    is_loopback,
)

__all__ = ["TOKEN_KEY", "Access", "server_credentials"]

_LOG = logging.getLogger(__name__)

AUTHORITIES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
"""Where Debian's and Red Hat's kinds of Linux keep them."""
TOKEN_KEY = "authorization"  # noqa: S105 - the name of a header

Options = list[tuple[str, int]]


def server_credentials(tls: Tls) -> Any:
    """For add_secure_port. Raises ConfigError for files that cannot be used."""
    files = [path for path in (tls.cert_file, tls.key_file, tls.ca_file) if path is not None]
    changes = FileChanges(files)
    changes.look()

    def renewed() -> Any:
        """In a thread of gRPC's, at each handshake; None: as before."""
        if not changes.look():
            return None
        try:
            now = _server_certificates(tls)
        except ConfigError as error:
            _LOG.warning("%s; the certificate of before is shown", error)
            return None
        _LOG.info("the certificate of %s is shown from now on", tls.cert_file)
        return now

    return grpc.dynamic_ssl_server_credentials(
        _server_certificates(tls), renewed, require_client_authentication=tls.mutual
    )


def _server_certificates(tls: Tls) -> Any:
    check_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.cert_file, tls.key_file)
    chain = read_pem("serving.tls.cert_file", tls.cert_file)
    key = read_pem("serving.tls.key_file", tls.key_file)
    authorities = None
    if tls.ca_file is not None:
        authorities = read_pem("serving.tls.ca_file", tls.ca_file)
    return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def read_pem(name: str, path: str) -> bytes:
    """ConfigError unless it is a file in PEM."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{name} {path}: holds no PEM; it begins with -----BEGIN")
    return data


class Access:
    """Of one client: makes its channels, and says what goes with its calls. Safe across threads."""

    def __init__(self, endpoint: str, security: ClientSecurity | None) -> None:
        """`security` None: as the environment says. Raises ConfigError for files that cannot be
        used."""
        self._endpoint = endpoint
        self._security = ClientSecurity.from_environment() if security is None else security
        self._files = FileChanges(self._security.tls_files)
        self._credentials: Any = None
        """Of the last channel."""
        token_file = self._security.token_file
        self._token = None if token_file is None else TokenFile(token_file)
        host = endpoint.rpartition(":")[0].strip("[]")
        if self._token is not None and not self._security.uses_tls and not is_loopback(host):
            _LOG.warning(
                "the token of %s goes to %s in plain text: --ca or DATASERVICE_TLS_CA has it go "
                "through TLS",
                token_file,
                endpoint,
            )

    def channel(self, maker: Any, options: Options) -> Any:
        """`maker`: grpc or grpc.aio. Raises ConfigError for files that cannot be used, the first
        time; later ones show what the channel before them did."""
        security = self._security
        if not security.uses_tls:
            return maker.insecure_channel(self._endpoint, options=options)
        self._files.look()
        try:
            self._credentials = _channel_credentials(security)
        except ConfigError as error:  # one file is there, the other is on its way
            if self._credentials is None:
                raise
            _LOG.warning("%s; the files of before are shown", error)
        more: list[tuple[str, Any]] = [*options]
        if security.server_name is not None:
            more.append(("grpc.ssl_target_name_override", security.server_name))
        return maker.secure_channel(self._endpoint, self._credentials, options=more)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        return None if self._token is None else ((TOKEN_KEY, f"Bearer {self._token.token}"),)

    def is_renewed(self) -> bool:
        """Whether the next channel would show another certificate, or trust another authority."""
        return self._security.uses_tls and self._files.look()

    def is_refused(self, error: Exception) -> bool:
        """Whether it is worth asking `explained`."""
        return isinstance(error, ServiceUnavailable) and may_be_refusal(str(error))

    def explained(self, error: Exception) -> Exception:
        """A handshake that failed, in words and for good, as far as another one tells why: within
        a few seconds."""
        why = refusal(self._endpoint, self._security)
        return error if why is None else AccessRefused(f"{self._endpoint}: {why}")


def _of_the_machine() -> bytes | None:
    """Who the machine trusts, as far as it says so in one file; None: gRPC's own list."""
    for path in (ssl.get_default_verify_paths().cafile, *AUTHORITIES):
        if path is not None and Path(path).is_file():
            return read_pem("the machine's authorities", path)
    return None


def _channel_credentials(security: ClientSecurity) -> Any:
    ca_file, cert_file, key_file = security.ca_file, security.cert_file, security.key_file
    authorities = _of_the_machine() if ca_file is None else read_pem("ca", ca_file)
    if cert_file is None or key_file is None:
        return grpc.ssl_channel_credentials(authorities)
    check_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert_file, key_file)
    return grpc.ssl_channel_credentials(
        authorities, read_pem("key", key_file), read_pem("cert", cert_file)
    )
