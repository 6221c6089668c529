"""The reading ends: a function that brings one block, by its place among the sizes.

What is brought: of ours arrays, checked, in reused memory; of the sockets bytes in reused memory;
of bare gRPC and of Flight the messages as they are handed over, left where they lie.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np

from dataservice.rpc.channel import DATA_OPTIONS
from dataservice.rpc.client import SINGLE_THREADED
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.messages import StreamPack
from trainer_client.buffers import BufferPool
from trainer_client.fetching import WorkerLink
from transports.servers import BARE_METHOD

Bring = Callable[[int], None]
POOL_BYTES = 256 << 20
TIMEOUT_S = 60.0


def ours_secured(where: str, sizes: Sequence[int]) -> Bring:
    endpoint, ca_file, token_file = where.split(" ")
    security = ClientSecurity(ca_file=ca_file, token_file=token_file)
    return ours(endpoint, sizes, local=False, security=security)


def ours(
    where: str, _sizes: Sequence[int], *, local: bool, security: ClientSecurity | None = None
) -> Bring:
    link = WorkerLink(where, local=local, security=security)
    pool = BufferPool(max_bytes=POOL_BYTES)

    def bring(number: int) -> None:
        request = StreamPack(session=1, pack_id=str(number), dp_rank=0, wait_s=10.0)
        (arrays, _), came_locally = link.fetch(request, timeout_s=TIMEOUT_S, allocate=pool.take)
        assert came_locally == local and arrays["pixel_values"].size

    return bring


def grpc_bare(where: str, sizes: Sequence[int], *, tuned: bool) -> Bring:
    options = [*DATA_OPTIONS, *SINGLE_THREADED] if tuned else []
    channel = grpc.insecure_channel(
        where, options=[*options, ("grpc.max_receive_message_length", -1)]
    )
    stream = channel.unary_stream(BARE_METHOD)

    def bring(number: int) -> None:
        assert channel is not None  # which ends with its last reference
        assert sum(map(len, stream(str(number).encode(), timeout=TIMEOUT_S))) == sizes[number]

    return bring


def _from_socket(connection: socket.socket, sizes: Sequence[int]) -> Bring:
    connection.settimeout(TIMEOUT_S)
    places = [memoryview(np.ones(size, np.uint8)) for size in sizes]

    def bring(number: int) -> None:
        connection.sendall(bytes([number]))
        left = places[number]
        while len(left):
            left = left[connection.recv_into(left) :]

    return bring


def tcp(where: str, sizes: Sequence[int]) -> Bring:
    host, _, port = where.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _from_socket(connection, sizes)


def unix(where: str, sizes: Sequence[int]) -> Bring:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + where)
    return _from_socket(connection, sizes)


def flight(where: str, sizes: Sequence[int]) -> Bring:
    import pyarrow.flight

    client = pyarrow.flight.connect(f"grpc://{where}")

    def bring(number: int) -> None:
        reader = client.do_get(pyarrow.flight.Ticket(str(number).encode()))
        assert sum(chunk.data.num_rows for chunk in reader) == sizes[number]

    return bring


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    name: str
    server: str
    """A kind of transports.servers."""
    connect: Callable[[str, Sequence[int]], Bring]


OURS_REMOTE = Way(
    name="ours, as from another host", server="ours", connect=partial(ours, local=False)
)
OURS_SECURED = Way(name="ours, with TLS and token", server="ours_secured", connect=ours_secured)
OURS_LOCAL = Way(name="ours, on the same host", server="ours", connect=partial(ours, local=True))
BARE_GRPC = Way(name="bare gRPC", server="grpc", connect=partial(grpc_bare, tuned=False))
TUNED_GRPC = Way(name="bare gRPC, tuned", server="grpc", connect=partial(grpc_bare, tuned=True))
OTHERS: tuple[Way, ...] = (
    Way(name="TCP, recv_into", server="tcp", connect=tcp),
    Way(name="Unix socket, recv_into", server="unix", connect=unix),
    Way(name="Arrow Flight", server="flight", connect=flight),
)
WAYS: tuple[Way, ...] = (OURS_REMOTE, OURS_SECURED, BARE_GRPC, TUNED_GRPC, OURS_LOCAL, *OTHERS)
