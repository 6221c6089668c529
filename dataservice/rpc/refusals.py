"""Why no TLS connection comes about, in words: gRPC says of most reasons that a socket closed.

Invariants: what is found is by a handshake of its own, with the same files, that sends no request
and no token; it is bounded in time; only a reason that does not pass by itself is told.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator

from dataservice.rpc.security import ClientSecurity

TIMEOUT_S = 2.0
"""Of one step of a handshake."""
AGAIN_S = 0.3
"""Before a second one, which a service that is just ending does not answer as the first."""

_SIGNS = (
    "Socket closed",
    "andshake",
    "Hostname Verification",
    "onnection reset",
    "Broken pipe",
)
_NO_CONNECTION = "failed to connect to all addresses"

EXPIRED, NOT_YET = 10, 9
OTHER_NAME = (62, 64)  # of a host, of an address

_NOT_TAKEN = (
    "CERTIFICATE_REQUIRED",
    "HANDSHAKE_FAILURE",
    "UNKNOWN_CA",
    "CERTIFICATE_EXPIRED",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")


def may_be_refusal(text: str) -> bool:
    """Whether gRPC's words for a failed call leave room for it."""
    return _NO_CONNECTION in text and any(sign in text for sign in _SIGNS)


def refusal(endpoint: str, security: ClientSecurity) -> str | None:
    """What this end or the other does not take, and the remedy; None: nothing that is known.

    gRPC's server says nothing of a certificate that it does not take: it ends the connection when
    the handshake is done, before HTTP/2 begins.
    """
    try:
        if not security.uses_tls:
            return _asks_for_tls(endpoint)
        first = _handshake(endpoint, security)
        if first is None:
            return None
        time.sleep(AGAIN_S)
        return _handshake(endpoint, security)
    except OSError:  # also of TLS, and of a time that ran out
        return None


def _asks_for_tls(endpoint: str) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent to it but the greeting
    try:
        with _connected(endpoint, context, None):
            pass
    except ssl.SSLError as error:
        if not _has(error, _NOT_TAKEN):
            return None
    return (
        "it speaks TLS, and this end plain text; give the authority that signed its certificate "
        "by --ca or DATASERVICE_TLS_CA"
    )


def _handshake(endpoint: str, security: ClientSecurity) -> str | None:
    context = ssl.create_default_context(cafile=security.ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which gRPC does not ask for, either
    context.set_alpn_protocols(["h2"])
    if security.cert_file is not None:
        context.load_cert_chain(security.cert_file, security.key_file)
    try:
        with _connected(endpoint, context, security.server_name) as connection:
            if connection.recv(1):  # HTTP/2 begins
                return None
    except ssl.SSLCertVerificationError as error:
        return _of_their_certificate(error, security)
    except ssl.SSLError as error:
        return _of_our_end(error, security)
    return _of_our_certificate(security)


def _of_their_certificate(error: ssl.SSLCertVerificationError, security: ClientSecurity) -> str:
    if error.verify_code in (EXPIRED, NOT_YET):
        return (
            f"its certificate is not valid now ({error.verify_message}); renew "
            "serving.tls.cert_file at the service, and compare the clocks"
        )
    if error.verify_code in OTHER_NAME:
        return (
            f"its certificate is for other names ({error.verify_message}); connect by one of "
            "those, or give it by --server-name or DATASERVICE_TLS_SERVER_NAME"
        )
    who = "the machine's authorities" if security.ca_file is None else f"ca {security.ca_file}"
    return (
        f"its certificate is not signed by {who} ({error.verify_message}); give the authority "
        "that signed it by --ca or DATASERVICE_TLS_CA"
    )


def _of_our_end(error: ssl.SSLError, security: ClientSecurity) -> str | None:
    if _has(error, _NO_TLS):
        return (
            "it speaks plain text, and this end TLS; set serving.tls at the service, or unset "
            "--ca, --cert and the DATASERVICE_TLS variables here"
        )
    return _of_our_certificate(security) if _has(error, _NOT_TAKEN) else None


def _of_our_certificate(security: ClientSecurity) -> str:
    if security.cert_file is None:
        return (
            "it asks for a client certificate; give one by --cert and --key, or "
            "DATASERVICE_TLS_CERT and DATASERVICE_TLS_KEY"
        )
    return (
        f"it does not take the certificate {security.cert_file}; give one that is valid now and "
        "that its serving.tls.ca_file signed, by --cert and --key, or DATASERVICE_TLS_CERT and "
        "DATASERVICE_TLS_KEY"
    )


def _has(error: ssl.SSLError, reasons: tuple[str, ...]) -> bool:
    return any(reason in (error.reason or "") for reason in reasons)


@contextlib.contextmanager
def _connected(
    endpoint: str, context: ssl.SSLContext, server_name: str | None
) -> Iterator[ssl.SSLSocket]:
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
        with context.wrap_socket(plain, server_hostname=server_name or host) as connection:
            yield connection
