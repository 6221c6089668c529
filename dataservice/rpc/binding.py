"""Where a server listens, as text: "host:port" or "[v6 address]:port"."""

from __future__ import annotations

import logging
import re

from dataservice.errors import ConfigError
from dataservice.rpc.security import ServerSecurity, check_reachable, is_loopback

_LOG = logging.getLogger(__name__)


def checked_bind(bind: str, security: ServerSecurity) -> tuple[str, int]:
    """Host and port. ConfigError for text that is neither form, and for a host beyond loopback
    without TLS and token."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/\s]+)):([0-9]{1,5})", bind)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f'bind: {bind!r} is not "host:port"; for instance "127.0.0.1:7070"')
    host, port = match[1] or match[2], int(match[3])
    check_reachable(f"bind: {bind!r}", host, security)
    if security.tls is None and not is_loopback(host):
        _LOG.warning("serving on %s in plain text to whoever reaches it (--insecure)", bind)
    return host, port


def endpoint_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
