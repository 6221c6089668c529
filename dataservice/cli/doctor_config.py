"""What a config names: its sources, its tokenizer, its folders, ports, certificates and token.

Invariants: no record is parsed and no index is written; storage that does not answer costs
LIST_S for each source, not more; a secret is never printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from rich.filesize import decimal

from dataservice.cli.doctor_finding import Finding, ok, problem, warning
from dataservice.config import Config
from dataservice.config.settings import ServingSettings
from dataservice.errors import ConfigError, DataServiceError, StorageError
from dataservice.rpc.security import TokenFile, server_ssl_context
from dataservice.storage.listing import FoundFile, SourceListing, list_source
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles

LIST_S = 20.0
READ_FILES = 16
"""Of each source, from which a byte is read."""
DEFAULT_PORT = 7070
_LOOPBACK = "127.0.0.1"


def config_findings(config: Config) -> Iterator[Finding]:
    store = Store()
    with contextlib.closing(store):
        for source in config.sources:
            yield source_of(source, store, leave_out=config.index_dir)
    yield tokenizer(config)
    yield index_folder(config.index_dir)
    yield from security(config.serving)


# ---- data ----------------------------------------------------------------------------------------


def source_of(source: SourceFiles, store: Store, *, leave_out: str) -> Finding:
    """Whether its files are there and may be read."""
    name = f"source {source.name}"
    try:
        listing = list_source(source, store, deadline_s=LIST_S, leave_out=leave_out)
        for file in _some(listing):
            store.read(file.url, 0, 1, deadline_s=LIST_S)
    except ConfigError as error:
        return problem(name, str(error), "correct the pattern, or bring the files")
    except (StorageError, OSError) as error:
        remedy = "check the permissions, the mount or the credentials of this user on this machine"
        return problem(name, str(error), remedy)
    size = sum(file.stat.size_bytes for file in listing.records)
    images = {file.url for files in (*listing.beside, listing.roots) for file in files}
    return ok(
        name,
        f"record files {len(listing.records):,} of {decimal(size)}, archives and folders of "
        f"images {len(images):,}",
    )


def _some(listing: SourceListing) -> list[FoundFile]:
    """Files from all over it."""
    files = [*listing.records, *(file for archives in listing.beside for file in archives)]
    files = [file for file in files if file.stat.size_bytes > 0]
    step = max(1, len(files) // READ_FILES)
    return files[::step][:READ_FILES]


def tokenizer(config: Config) -> Finding:
    from dataservice.pipeline.text import TextRenderer

    try:
        renderer = TextRenderer.build(config.text)
    except (DataServiceError, OSError) as error:
        return problem("tokenizer", str(error), "name a tokenizer that this machine can read")
    return ok("tokenizer", f"fingerprint {renderer.fingerprint[:12]}")


def index_folder(folder: str) -> Finding:
    """The service reads it; only `index` writes to it."""
    if not os.path.isdir(folder):
        return ok("index", f"{folder} is not there yet: `dataservice index` makes it")
    if not os.access(folder, os.R_OK | os.X_OK):
        return problem("index", f"{folder} cannot be read", "let this user read index_dir")
    return ok("index", folder)


# ---- who may come in -----------------------------------------------------------------------------


def security(serving: ServingSettings) -> Iterator[Finding]:
    loopback = serving.host in (_LOOPBACK, "localhost", "::1")
    if not loopback and (serving.tls is None or serving.token_file is None):
        lacking = [
            name
            for name, part in (("tls", serving.tls), ("token_file", serving.token_file))
            if part is None
        ]
        told = f"{serving.host} is reached by other machines, without {' and '.join(lacking)}"
        remedy = "set serving.tls and serving.token_file, or serving.host: 127.0.0.1"
        yield (warning if serving.insecure else problem)("who may connect", told, remedy)
    if serving.token_file is not None:
        yield token(serving.token_file)
    if serving.tls is not None:
        try:
            server_ssl_context(serving.tls)
        except ConfigError as error:
            yield problem("certificate", str(error), "name a certificate and the key it belongs to")
        else:
            yield ok("certificate", f"{serving.tls.cert_file} and its key fit each other")
            yield from _private("key", serving.tls.key_file)


def token(path: str) -> Finding:
    try:
        TokenFile(path)
    except ConfigError as error:
        remedy = f"openssl rand -hex 32 > {path}; chmod 600 {path}; the same on every machine"
        return problem("token", str(error), remedy)
    return next(_private("token", path), ok("token", path))


def _private(name: str, path: str) -> Iterator[Finding]:
    """Where others of this machine may read it, too."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o007:
        words = f"{path} may be read by everybody on this machine (mode {mode:04o})"
        yield warning(name, words, f"chmod 600 {path}")


# ---- ports ---------------------------------------------------------------------------------------


def ports(serving: ServingSettings | None) -> Iterator[Finding]:
    """Of the coordinator's calls and of its status page; those that any free one will do for are
    not looked at."""
    host = _LOOPBACK if serving is None else serving.host
    port = DEFAULT_PORT if serving is None else serving.port
    page = "auto" if serving is None else serving.http_port
    if port:
        yield _port("port", host, port, "serving.port")
    else:
        yield ok("port", "any free one (serving.port is 0)")
    if page == "auto" and 0 < port < 65535:
        found = _port("status page's port", host, port + 1, "serving.http_port")
        if found.level == "problem":  # then the service takes another
            found = warning(found.name, found.words, found.remedy)
        yield found
    elif isinstance(page, int) and page:
        yield _port("status page's port", host, page, "serving.http_port")


def _port(name: str, host: str, port: int, field: str) -> Finding:
    shown = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            remedy = "name an address of this machine in serving.host, and a port above 1023"
            return problem(name, f"{shown}: {error.strerror or error}", remedy)
        return problem(
            name,
            f"{shown} is in use",
            f"stop what listens there (`ss -ltnp` names it; perhaps it is this service, running), "
            f"or choose another {field}",
        )
    return ok(name, f"{shown} is free")
