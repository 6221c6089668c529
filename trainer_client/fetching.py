"""One worker as a trainer sees it: through shared memory on its own host, over gRPC elsewhere.

Invariants: which way is found out once, by the first fetch; a pack is whole and checked either way;
what fails is raised as it is, and the caller drops the worker; safe across threads, of which
LOCAL_CONNECTIONS at a time have shared memory, and the others gRPC.
"""

from __future__ import annotations

import threading

from dataservice.errors import ServiceUnavailable
from dataservice.rpc import local_client
from dataservice.rpc.client import DataClient
from dataservice.rpc.local_client import LocalClient, Pack
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.codec import PackDecoder
from dataservice.wire.layout import Allocate, fresh
from dataservice.wire.messages import StreamPack

LOCAL_CONNECTIONS = 2
"""To one worker: that of the thread that fetches ahead, and one for who asks meanwhile."""


class WorkerLink:
    """Every connection is made when it is needed."""

    def __init__(
        self, endpoint: str, *, local: bool, security: ClientSecurity | None = None
    ) -> None:
        """Without `local`, gRPC alone; `security` as rpc.client.DataClient has it."""
        self._security = security
        self.endpoint = endpoint
        self._connecting = threading.Lock()
        self._guard = threading.Lock()
        self._local_is_left = local
        self._locals: list[LocalClient] = []
        self._remote: DataClient | None = None
        self._closed = False

    def fetch(
        self, request: StreamPack, *, timeout_s: float, allocate: Allocate = fresh
    ) -> tuple[Pack, bool]:
        """The pack, in memory of `allocate`, and whether it came through shared memory."""
        tried = 0
        while tried < LOCAL_CONNECTIONS and (client := self._local_client(tried)) is not None:
            pack = client.fetch(request, timeout_s, allocate=allocate)
            if pack is not None:
                return pack, True
            tried += 1
        decoder = PackDecoder(allocate=allocate)
        with self._remote_client().stream_pack(request, timeout_s=timeout_s) as frames:
            for frame in frames:
                decoder.feed(frame)
                del frame  # the next one takes its memory, which is in the cache
        return decoder.result(), False

    def _local_client(self, number: int) -> LocalClient | None:
        with self._connecting:
            if number == len(self._locals) and self._local_is_left:
                client = local_client.connect(self.endpoint)
                self._local_is_left = client is not None
                if client is not None:
                    with self._guard:
                        self._locals.append(client)
                        closed = self._closed
                    if closed:
                        client.close()
            return self._locals[number] if number < len(self._locals) else None

    def _remote_client(self) -> DataClient:
        with self._guard:
            if self._closed:
                raise ServiceUnavailable(f"the connection to {self.endpoint} is closed")
            if self._remote is None:
                self._remote = DataClient(self.endpoint, self._security)
            return self._remote

    def close(self) -> None:
        """Ends what is under way; idempotent, from any thread."""
        with self._guard:
            self._closed = True
            clients: list[LocalClient | DataClient] = [*self._locals]
            if self._remote is not None:
                clients.append(self._remote)
        for client in clients:
            client.close()
