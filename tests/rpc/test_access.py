"""TLS, client certificates and tokens on every call, by real handshakes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import TOKEN, Authority, replace_file

from dataservice.errors import AccessRefused, ConfigError, ServiceUnavailable
from dataservice.rpc.aio import AsyncCoordinatorClient, AsyncDataClient
from dataservice.rpc.client import CoordinatorClient, DataClient
from dataservice.rpc.security import ClientSecurity, ServerSecurity, Tls
from dataservice.rpc.server import start_server
from dataservice.wire.messages import COORDINATOR_METHODS, GetStatus, StatusReport, StreamPack

Serve = Callable[..., Any]
PACK = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)
STATUS = StatusReport(status="here")
OTHER_TOKEN = "f" * 32


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


def both(serve: Serve, security: ServerSecurity) -> Any:
    """A coordinator and a worker on one port."""
    return serve(coordinator=lambda _: STATUS, data=lambda _: [b"a", b"b"], security=security)


def ask(endpoint: str, security: ClientSecurity) -> StatusReport:
    with CoordinatorClient(endpoint, security) as client:
        report: StatusReport = client.call(GetStatus(), 20.0)
        return report


def stream(endpoint: str, security: ClientSecurity) -> list[bytes]:
    with DataClient(endpoint, security) as client, client.stream_pack(PACK, 20.0) as frames:
        return list(frames)


def ask_async(endpoint: str, security: ClientSecurity) -> StatusReport:
    async def run() -> StatusReport:
        async with AsyncCoordinatorClient(endpoint, security) as client:
            report: StatusReport = await client.call(GetStatus(), 20.0)
            return report

    return asyncio.run(run())


def stream_async(endpoint: str, security: ClientSecurity) -> list[bytes]:
    async def run() -> list[bytes]:
        async with AsyncDataClient(endpoint, security) as client:
            return [frame async for frame in client.stream_pack(PACK, 20.0)]

    return asyncio.run(run())


CLIENTS = pytest.mark.parametrize("use", [ask, stream, ask_async, stream_async])


# ---- who is let in ------------------------------------------------------------------------------


@CLIENTS
def test_with_certificates_of_both_ends_and_a_token(
    serve: Serve, authority: Authority, use: Callable[..., Any]
) -> None:
    server = both(serve, authority.server(mutual=True, token=TOKEN))
    assert use(server.endpoint, authority.client("rank", token=TOKEN)) in (STATUS, [b"a", b"b"])


@CLIENTS
def test_what_the_environment_names(
    serve: Serve,
    authority: Authority,
    use: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = both(serve, authority.server("svc.test", mutual=True, token=TOKEN))
    shown = authority.client("rank", token=TOKEN)
    for name, value in (
        ("TLS_CA", shown.ca_file),
        ("TLS_CERT", shown.cert_file),
        ("TLS_KEY", shown.key_file),
        ("TLS_SERVER_NAME", "svc.test"),
        ("TOKEN_FILE", shown.token_file),
    ):
        assert value is not None
        monkeypatch.setenv(f"DATASERVICE_{name}", value)
    assert use(server.endpoint, None) in (STATUS, [b"a", b"b"])


@CLIENTS
def test_a_service_that_the_machine_trusts(
    serve: Serve, authority: Authority, use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = both(serve, authority.server())
    monkeypatch.setenv("DATASERVICE_TLS", "1")
    with pytest.raises(AccessRefused, match="not signed by the machine's authorities"):
        use(server.endpoint, None)
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
    assert use(server.endpoint, None) in (STATUS, [b"a", b"b"])


def test_a_worker_shows_the_files_of_its_service(serve: Serve, authority: Authority) -> None:
    security = authority.server("svc.test", mutual=True, token=TOKEN)
    assert security.tls is not None
    security = replace(security, tls=replace(security.tls, server_name="svc.test"))
    server = both(serve, security)
    assert ask_async(server.endpoint, ClientSecurity.of_member(security)) == STATUS


# ---- who is not ---------------------------------------------------------------------------------


@CLIENTS
def test_a_service_of_another_authority(
    serve: Serve, authority: Authority, stranger: Authority, use: Callable[..., Any]
) -> None:
    server = both(serve, authority.server())
    with pytest.raises(AccessRefused, match=r"not signed by ca .*theirs/ca\.pem .*--ca or DATASE"):
        use(server.endpoint, stranger.client())


@CLIENTS
def test_a_service_whose_certificate_has_expired(
    serve: Serve, authority: Authority, use: Callable[..., Any]
) -> None:
    server = both(serve, authority.server(expired=True))
    with pytest.raises(AccessRefused, match=r"not valid now \(certificate has expired\); renew"):
        use(server.endpoint, authority.client())


@CLIENTS
def test_a_service_of_another_name(
    serve: Serve, authority: Authority, use: Callable[..., Any]
) -> None:
    server = both(serve, authority.server("svc.test"))
    with pytest.raises(AccessRefused, match=r"for other names .*--server-name or DATASERVICE_TLS"):
        use(server.endpoint, authority.client())


@CLIENTS
def test_no_client_certificate(serve: Serve, authority: Authority, use: Callable[..., Any]) -> None:
    server = both(serve, authority.server(mutual=True))
    with pytest.raises(AccessRefused, match="asks for a client certificate; give one by --cert"):
        use(server.endpoint, authority.client())


@CLIENTS
@pytest.mark.parametrize("why", ["expired", "of another authority"])
def test_a_client_certificate_that_is_not_taken(
    serve: Serve, authority: Authority, stranger: Authority, use: Callable[..., Any], why: str
) -> None:
    server = both(serve, authority.server(mutual=True))
    if why == "expired":
        shown = authority.client("rank", expired=True)
    else:
        shown = replace(stranger.client("rank"), ca_file=authority.ca_file)
    with pytest.raises(AccessRefused, match=r"does not take the certificate .*rank\.pem"):
        use(server.endpoint, shown)


@CLIENTS
def test_plain_text_to_tls(serve: Serve, authority: Authority, use: Callable[..., Any]) -> None:
    server = both(serve, authority.server())
    with pytest.raises(AccessRefused, match="it speaks TLS, and this end plain text; give the au"):
        use(server.endpoint, ClientSecurity())


@CLIENTS
def test_tls_to_plain_text(serve: Serve, authority: Authority, use: Callable[..., Any]) -> None:
    server = both(serve, ServerSecurity())
    with pytest.raises(AccessRefused, match="it speaks plain text, and this end TLS; set serving"):
        use(server.endpoint, authority.client())


@CLIENTS
@pytest.mark.parametrize("shown", [None, OTHER_TOKEN, TOKEN[:-1], TOKEN + "0"])
def test_a_token_that_is_not_the_service_s(
    serve: Serve, authority: Authority, use: Callable[..., Any], shown: str | None
) -> None:
    server = both(serve, ServerSecurity(token_file=authority.token(TOKEN)))
    client = replace(authority.client(token=shown), ca_file=None)
    words = "none came with the call" if shown is None else "does not take this token; the file"
    with pytest.raises(AccessRefused, match=rf"{words}.*DATASERVICE_TOKEN_FILE"):
        use(server.endpoint, client)


def test_a_refusal_is_final(serve: Serve, authority: Authority) -> None:
    """A trainer tries again what passes; this is no such thing."""
    from trainer_client.patience import PASSING

    assert not issubclass(AccessRefused, PASSING)
    assert issubclass(AccessRefused, ConfigError)


def test_who_is_not_there_is_no_refusal(authority: Authority) -> None:
    with pytest.raises(ServiceUnavailable):
        ask("127.0.0.1:1", authority.client("rank", token=TOKEN))


@pytest.mark.parametrize("method", sorted(COORDINATOR_METHODS))
def test_every_method_asks_for_the_token_before_it_reads(
    serve: Serve, authority: Authority, method: str
) -> None:
    called: list[Any] = []
    server = serve(
        coordinator=called.append, security=ServerSecurity(token_file=authority.token(TOKEN))
    )
    with (
        grpc.insecure_channel(server.endpoint) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/dataservice.v1.Coordinator/{method}")(
            b"no message", timeout=10, metadata=(("authorization", f"Basic {TOKEN}"),)
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert called == []


def test_health_asks_for_no_token_but_for_the_certificate(
    serve: Serve, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = both(serve, authority.server(mutual=True, token=TOKEN))
    cert, key = authority.issue("probe")
    pems = [Path(path).read_bytes() for path in (authority.ca_file, key, cert)]
    with grpc.secure_channel(server.endpoint, grpc.ssl_channel_credentials(*pems)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="dataservice.v1.Data")
        assert stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
        assert next(stub.Watch(request, timeout=10)).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caplog.text == ""


# ---- renewed files ------------------------------------------------------------------------------


def test_a_server_shows_its_renewed_certificate(serve: Serve, authority: Authority) -> None:
    server = both(serve, authority.server(expired=True))
    with pytest.raises(AccessRefused, match="expired"):
        ask(server.endpoint, authority.client())
    authority.issue("server", "127.0.0.1")
    assert ask(server.endpoint, authority.client()) == STATUS


def test_a_server_keeps_its_certificate_while_half_of_the_next_is_there(
    serve: Serve, authority: Authority
) -> None:
    security = authority.server()
    assert security.tls is not None
    server = both(serve, security)
    old_key = Path(security.tls.key_file).read_bytes()
    authority.issue("server", "127.0.0.1")
    new_key = Path(security.tls.key_file).read_bytes()
    replace_file(Path(security.tls.key_file), old_key)
    assert ask(server.endpoint, authority.client()) == STATUS
    replace_file(Path(security.tls.key_file), new_key)
    assert ask(server.endpoint, authority.client()) == STATUS


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_client_connects_with_its_renewed_certificate(
    serve: Serve, authority: Authority, kind: str
) -> None:
    """After one call that fails in a way that passes."""
    server = both(serve, authority.server(mutual=True))
    shown = authority.client("rank", expired=True)
    if kind == "blocking":
        with CoordinatorClient(server.endpoint, shown) as client:
            authority.issue("rank")
            with pytest.raises(ServiceUnavailable):
                client.call(GetStatus(), 10.0)
            assert client.call(GetStatus(), 10.0) == STATUS
        return

    async def run() -> None:
        async with AsyncCoordinatorClient(server.endpoint, shown) as client:
            with pytest.raises(AccessRefused):
                await client.call(GetStatus(), 10.0)
            authority.issue("rank")
            with pytest.raises(ServiceUnavailable):
                await client.call(GetStatus(), 10.0)
            assert await client.call(GetStatus(), 10.0) == STATUS

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_client_keeps_its_certificate_while_half_of_the_next_is_there(
    serve: Serve, authority: Authority, kind: str
) -> None:
    """A worker or trainer that ended with ConfigError then would end for nothing."""
    server = both(serve, authority.server(mutual=True))
    shown = authority.client("rank", expired=True)
    assert shown.key_file is not None
    key = Path(shown.key_file)
    old_key = key.read_bytes()

    def half() -> bytes:
        authority.issue("rank")
        new_key = key.read_bytes()
        replace_file(key, old_key)
        return new_key

    if kind == "blocking":
        with CoordinatorClient(server.endpoint, shown) as client:
            new_key = half()
            for _ in range(2):
                with pytest.raises(ServiceUnavailable):
                    client.call(GetStatus(), 10.0)
            replace_file(key, new_key)
            with pytest.raises(ServiceUnavailable):
                client.call(GetStatus(), 10.0)
            assert client.call(GetStatus(), 10.0) == STATUS
        return

    async def run() -> None:
        async with AsyncCoordinatorClient(server.endpoint, shown) as client:
            with pytest.raises(AccessRefused):
                await client.call(GetStatus(), 10.0)
            new_key = half()
            for _ in range(2):
                with pytest.raises(ServiceUnavailable):
                    await client.call(GetStatus(), 10.0)
            replace_file(key, new_key)
            with pytest.raises(ServiceUnavailable):
                await client.call(GetStatus(), 10.0)
            assert await client.call(GetStatus(), 10.0) == STATUS

    asyncio.run(run())


def test_a_token_is_changed_while_clients_show_the_old_one(
    serve: Serve, authority: Authority
) -> None:
    server = both(serve, ServerSecurity(token_file=authority.token(TOKEN)))
    shown = replace(authority.client(token=TOKEN), ca_file=None)
    with CoordinatorClient(server.endpoint, shown) as client:
        assert client.call(GetStatus(), 10.0) == STATUS
        authority.token(f"{TOKEN}\n{OTHER_TOKEN}\n")  # the service takes both
        assert client.call(GetStatus(), 10.0) == STATUS
        authority.token(OTHER_TOKEN, "client.token")
        assert client.call(GetStatus(), 10.0) == STATUS
        authority.token(OTHER_TOKEN)
        assert client.call(GetStatus(), 10.0) == STATUS
        authority.token(TOKEN, "client.token")
        with pytest.raises(AccessRefused):
            client.call(GetStatus(), 10.0)


# ---- files that cannot be used ------------------------------------------------------------------


def start_and_stop(security: ServerSecurity, bind: str = "127.0.0.1:0") -> None:
    async def run() -> None:
        server = await start_server(data=object(), bind=bind, security=security)  # type: ignore[arg-type]
        await server.stop(0)

    asyncio.run(run())


def test_a_server_says_which_file_it_cannot_use(authority: Authority, tmp_path: Path) -> None:
    good = authority.server(token=TOKEN).tls
    assert good is not None
    other_cert, _ = authority.issue("other")
    nothing = str(tmp_path / "nothing.pem")
    text = tmp_path / "text.pem"
    text.write_text("text")
    wrong: list[tuple[Tls, str]] = [
        (replace(good, cert_file=nothing), "nothing.pem"),
        (replace(good, cert_file=other_cert), "other.pem.*cannot be used"),
        (replace(good, ca_file=nothing), "serving.tls.ca_file .*nothing.pem: cannot be read"),
        (replace(good, ca_file=str(text)), "serving.tls.ca_file .*text.pem: holds no PEM"),
    ]
    for tls, words in wrong:
        with pytest.raises(ConfigError, match=words):
            start_and_stop(ServerSecurity(tls=tls))


def test_a_client_says_which_file_it_cannot_use(authority: Authority, tmp_path: Path) -> None:
    shown, nothing = authority.client("rank"), str(tmp_path / "nothing.pem")
    for wrong, words in (
        (replace(shown, ca_file=nothing), "ca .*nothing.pem: cannot be read"),
        (replace(shown, key_file=nothing), "key_file .*nothing.pem: cannot be used"),
        (replace(shown, token_file=nothing), "token_file .*nothing.pem: cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            CoordinatorClient("127.0.0.1:1", wrong)
    with pytest.raises(ConfigError, match="give both"):
        ClientSecurity(cert_file="rank.pem")


@pytest.mark.parametrize("missing", ["tls", "token_file"])
def test_others_are_served_with_tls_and_token_only(authority: Authority, missing: str) -> None:
    security = authority.server(token=TOKEN)
    start_and_stop(security, "0.0.0.0:0")
    less = replace(security, **{missing: None})
    with pytest.raises(ConfigError, match=rf"set serving\.{missing}, or use 127\.0\.0\.1"):
        start_and_stop(less, "0.0.0.0:0")
    start_and_stop(replace(less, insecure=True), "0.0.0.0:0")


def test_a_token_in_plain_text_to_another_host_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    shown = replace(authority.client(token=TOKEN), ca_file=None)
    with caplog.at_level(logging.WARNING):
        CoordinatorClient("127.0.0.1:1", shown).close()
        assert caplog.text == ""
        CoordinatorClient("192.0.2.1:1", shown).close()
    assert "goes to 192.0.2.1:1 in plain text" in caplog.text
    assert TOKEN not in caplog.text


def test_a_refusal_comes_soon(serve: Serve, authority: Authority) -> None:
    server = both(serve, authority.server(mutual=True))
    started = time.monotonic()
    with pytest.raises(AccessRefused):
        ask(server.endpoint, authority.client())
    assert time.monotonic() - started < 5.0
