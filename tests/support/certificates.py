"""Authorities and certificates of tests, in files as the settings name them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import trustme

from dataservice.rpc.security import ClientSecurity, ServerSecurity, Tls

TOKEN = "0123456789abcdef" * 2
PAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)


def replace_file(path: Path, data: bytes) -> None:
    """As whoever renews certificates does it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


class Authority:
    """Files in `folder`: ca.pem, and NAME.pem and NAME.key of each certificate."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.ca_file = str(folder / "ca.pem")
        Path(self.ca_file).write_bytes(self._ca.cert_pem.bytes())

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[str, str]:
        """Paths of certificate and key; of the same name, the next ones take their place."""
        before, after = PAST if expired else (None, None)
        made = self._ca.issue_cert(*(hosts or ("nobody.test",)), not_before=before, not_after=after)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        replace_file(cert, b"".join(pem.bytes() for pem in made.cert_chain_pems))
        replace_file(key, made.private_key_pem.bytes())
        return str(cert), str(key)

    def server(
        self, *hosts: str, mutual: bool = False, token: str | None = None, expired: bool = False
    ) -> ServerSecurity:
        cert, key = self.issue("server", *(hosts or ("127.0.0.1",)), expired=expired)
        tls = Tls(
            cert_file=cert, key_file=key, ca_file=self.ca_file, mutual=mutual, server_name=None
        )
        return ServerSecurity(tls=tls, token_file=None if token is None else self.token(token))

    def client(
        self, name: str | None = None, *, token: str | None = None, expired: bool = False
    ) -> ClientSecurity:
        """With a certificate of that name, or none."""
        cert, key = (None, None) if name is None else self.issue(name, expired=expired)
        token_file = None if token is None else self.token(token, "client.token")
        return ClientSecurity(
            ca_file=self.ca_file, cert_file=cert, key_file=key, token_file=token_file
        )

    def token(self, token: str, name: str = "server.token") -> str:
        path = self.folder / name
        replace_file(path, token.encode())
        return str(path)
