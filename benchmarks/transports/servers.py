"""The serving ends, each in a process of its own that ends with its standard input.

    python servers.py KIND SIZE_BYTES ...

prints one line, where it is to be reached. A request names a block by its place among the sizes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from dataservice.wire.messages import StreamPack
from transports.packs import FRAME_BYTES, pack_arrays, raw_block

BARE_METHOD = "/bench.Bare/Stream"


def wait_for_the_end() -> None:
    sys.stdin.buffer.read()


def told(where: str) -> None:
    sys.stdout.write(where + "\n")
    sys.stdout.flush()


# ---- ours ---------------------------------------------------------------------------------------


class Packs:
    """What a worker does once the packs are built."""

    def __init__(self, sizes: Sequence[int]) -> None:
        from dataservice.wire.encoded import EncodedPack

        self._packs = [EncodedPack(pack_arrays(size), {"pack_id": "0.0.0"}) for size in sizes]

    async def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        pack = self._packs[int(request.pack_id)]
        sent = await asyncio.to_thread(pack.compressed) if pack.shrinks else pack
        for frame in sent.frames():
            yield frame
            del frame

    async def whole_pack(self, request: StreamPack) -> Any:
        return self._packs[int(request.pack_id)]

    def taken(self, request: StreamPack, pack: Any) -> None:
        pass


async def _serve_ours(sizes: Sequence[int]) -> None:
    from dataservice.rpc.local_server import start_local_server
    from dataservice.rpc.server import start_server

    packs = Packs(sizes)
    server = await start_server(data=packs)
    local = start_local_server(packs, server.endpoint)
    assert local is not None
    told(server.endpoint)
    await asyncio.to_thread(wait_for_the_end)
    await local.stop(0)
    await server.stop(0)


def ours(sizes: Sequence[int]) -> None:
    asyncio.run(_serve_ours(sizes))


async def _serve_ours_secured(sizes: Sequence[int], folder: Path) -> None:
    """Where it is, and the files that a client needs, in one line: "HOST:PORT CA TOKEN"."""
    import trustme

    from dataservice.rpc.security import ServerSecurity, Tls
    from dataservice.rpc.server import start_server

    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    ca, cert, key, token = (folder / name for name in ("ca.pem", "cert.pem", "key.pem", "token"))
    authority.cert_pem.write_to_path(ca)
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    token.write_text(secrets.token_hex(32))
    tls = Tls(
        cert_file=str(cert), key_file=str(key), ca_file=str(ca), mutual=False, server_name=None
    )
    security = ServerSecurity(tls=tls, token_file=str(token))
    server = await start_server(data=Packs(sizes), security=security)
    told(f"{server.endpoint} {ca} {token}")
    await asyncio.to_thread(wait_for_the_end)
    await server.stop(0)


def ours_secured(sizes: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve_ours_secured(sizes, Path(folder)))


# ---- bare gRPC ----------------------------------------------------------------------------------


async def _serve_grpc(sizes: Sequence[int]) -> None:
    import grpc
    import grpc.aio

    blocks = [raw_block(size) for size in sizes]
    frames = [
        [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
        for block in blocks
    ]

    async def stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for frame in frames[int(request)]:
            yield frame

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bare", {"Stream": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told(f"127.0.0.1:{port}")
    await asyncio.to_thread(wait_for_the_end)
    await server.stop(0)


def grpc_bare(sizes: Sequence[int]) -> None:
    asyncio.run(_serve_grpc(sizes))


# ---- sockets ------------------------------------------------------------------------------------


def _answer(connection: socket.socket, blocks: Sequence[bytes]) -> None:
    with connection:
        while request := connection.recv(1):
            connection.sendall(blocks[request[0]])


def _serve_socket(listener: socket.socket, where: str, sizes: Sequence[int]) -> None:
    blocks = [raw_block(size) for size in sizes]
    listener.listen()
    told(where)
    threading.Thread(target=wait_for_the_end_of, args=(listener,), daemon=True).start()
    try:
        while True:
            connection, _ = listener.accept()
            if connection.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_answer, args=(connection, blocks), daemon=True).start()
    except OSError:
        return


def wait_for_the_end_of(listener: socket.socket) -> None:
    wait_for_the_end()
    listener.shutdown(socket.SHUT_RDWR)


def tcp(sizes: Sequence[int]) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    _serve_socket(listener, f"127.0.0.1:{listener.getsockname()[1]}", sizes)


def unix(sizes: Sequence[int]) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel draws a name in the abstract namespace
    _serve_socket(listener, listener.getsockname()[1:].decode(), sizes)


# ---- Arrow Flight -------------------------------------------------------------------------------


def flight(sizes: Sequence[int]) -> None:
    import pyarrow as pa
    import pyarrow.flight

    batches = []
    for size in sizes:
        block = pa.array(memoryview(raw_block(size)).cast("B"), pa.uint8())
        whole = pa.record_batch([block], names=["block"])
        cuts = range(0, size, FRAME_BYTES)
        batches.append((whole.schema, [whole.slice(at, FRAME_BYTES) for at in cuts]))

    class Server(pa.flight.FlightServerBase):
        def do_get(self, _context: Any, ticket: Any) -> Any:
            schema, parts = batches[int(ticket.ticket)]
            return pa.flight.GeneratorStream(schema, iter(parts))

    server = Server("grpc://127.0.0.1:0")
    told(f"127.0.0.1:{server.port}")
    wait_for_the_end()
    server.shutdown()


KINDS: dict[str, Callable[[Sequence[int]], None]] = {
    "ours": ours,
    "ours_secured": ours_secured,
    "grpc": grpc_bare,
    "tcp": tcp,
    "unix": unix,
    "flight": flight,
}


if __name__ == "__main__":
    KINDS[sys.argv[1]]([int(size) for size in sys.argv[2:]])
