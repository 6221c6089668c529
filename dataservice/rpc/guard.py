"""Who may call a server, and how much: its token, and limits for one connection and one host.

Invariants: nothing of a request's body is read before its caller is let in; what a caller is told
does not depend on how much of a token was right; what is remembered of callers is bounded; for one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from dataservice.errors import AccessRefused, DeadlineExceeded, ServiceUnavailable, WireError
from dataservice.rpc.access import TOKEN_KEY
from dataservice.rpc.security import ServerSecurity, TokenFile

__all__ = ["LIMITS", "Guard", "Limits", "request_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Past them a call is answered with ServiceUnavailable, and made again later."""

    calls_per_s: float
    """Of one connection, in the long run."""
    burst: int
    """Calls that a connection may make at once after a rest."""
    host_calls: int
    """Under way from one address at a time: of all its connections."""
    connections: int
    """Remembered at a time; the longest unheard are forgotten first."""


LIMITS = Limits(calls_per_s=1_000.0, burst=2_000, host_calls=16_384, connections=65_536)
"""A rank makes some ten calls a second, and holds two; a host of 8 GPUs has 8 ranks. The limit of a
host has room for 4,096 ranks behind one address. One connection has 256 streams (rpc.channel)."""


PACK_COST = 0.1
"""Of a pack, in calls: a rank may read thousands of small ones a second, each bounded by the
network, and none has the coordinator do anything."""
REQUEST_S = 10.0
"""For the body of a request, once its headers are there."""


@dataclass(slots=True)
class _Bucket:
    calls: float
    at_s: float


class Guard:
    """Raises ConfigError for a token file that cannot be used."""

    def __init__(
        self,
        security: ServerSecurity,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        token_file = security.token_file
        self._token = None if token_file is None else TokenFile(token_file)
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        """By connection, the longest unheard first."""
        self._under_way: dict[str, int] = {}
        """By host."""

    def check_token(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Raises AccessRefused."""
        if self._token is None:
            return
        given = next((value for key, value in metadata or () if key == TOKEN_KEY), None)
        if given is None:
            raise AccessRefused(
                "the service asks for a token, and none came with the call; name its file by "
                "--token-file or DATASERVICE_TOKEN_FILE"
            )
        kind, _, token = str(given).partition(" ")
        if kind.lower() != "bearer" or not self._token.matches(token.strip()):
            raise AccessRefused(
                "the service does not take this token; the file named by --token-file or "
                "DATASERVICE_TOKEN_FILE should hold one of those in serving.token_file"
            )

    @contextlib.contextmanager
    def lets_in(self, context: Any, *, cost: float = 1.0) -> Iterator[None]:
        """For as long as the call of a grpc.aio.ServicerContext takes. Raises AccessRefused, and
        ServiceUnavailable past the limits."""
        with self.call(context.peer(), cost=cost):
            self.check_token(context.invocation_metadata())
            yield

    @contextlib.contextmanager
    def call(self, peer: str, *, cost: float = 1.0) -> Iterator[None]:
        """For as long as a call of `peer` ("ipv4:address:port") takes, which counts as `cost`
        calls. Raises ServiceUnavailable past the limits."""
        self._count(peer, cost)
        host = peer.rpartition(":")[0]
        under_way = self._under_way.get(host, 0)
        if under_way >= self._limits.host_calls:
            raise ServiceUnavailable(
                f"{under_way} calls of this host are under way, which are the most; again later"
            )
        self._under_way[host] = under_way + 1
        try:
            yield
        finally:
            left = self._under_way[host] - 1
            if left:
                self._under_way[host] = left
            else:
                del self._under_way[host]

    def _count(self, peer: str, cost: float) -> None:
        limits, now_s = self._limits, self._clock()
        bucket = self._buckets.pop(peer, None)
        if bucket is None:
            bucket = _Bucket(float(limits.burst), now_s)
            while len(self._buckets) >= limits.connections:
                del self._buckets[next(iter(self._buckets))]
        self._buckets[peer] = bucket
        rested = bucket.calls + (now_s - bucket.at_s) * limits.calls_per_s
        bucket.calls, bucket.at_s = min(float(limits.burst), rested), now_s
        if bucket.calls < cost:
            raise ServiceUnavailable(
                f"this connection makes more than {limits.calls_per_s:g} calls a second; again "
                "later"
            )
        bucket.calls -= cost


async def request_of(method: str, context: Any) -> bytes:
    """The request of a call whose method is registered as one that takes a stream of them."""
    try:
        async with asyncio.timeout(REQUEST_S):
            data = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"{method}: no request within {REQUEST_S:g} s") from None
    if data is grpc.aio.EOF:
        raise WireError(f"{method}: the call ended without a request")
    return bytes(data)
