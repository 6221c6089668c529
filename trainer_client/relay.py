"""Packs that one process fetches for all readers of its rank on the same host.

The first of them (the leader) listens under a name made of the run, the rank and itself, in Linux's
abstract namespace, and puts each pack that it has fetched on a shelf of shared memory. The others
(followers) ask it as they would ask a worker on their host (rpc.local), and fetch by themselves
what they do not get.

Invariants:
- the leader never waits for a follower: memory is bounded, and what finds no room is not handed on;
- a follower waits for a pack at most WAIT_S, for a leader that does not move at most ASK_S and
  ANSWER_S, and after a wait in vain asks no more for a while, longer each time (PAUSES_S);
- a process that ends, however, leaves no name, no file and no memory, and the others go on;
- the leader has one thread, joined by `close`; a forked child keeps neither name nor connections.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Protocol

from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    StorageError,
    WireError,
)
from dataservice.rpc import local_client
from dataservice.rpc.local import (
    MAX_MESSAGE_BYTES,
    MAX_SEGMENT_BYTES,
    Answer,
    Segment,
    address_of,
    failure,
    let_in,
    new_socket,
)
from dataservice.rpc.local_client import LocalClient, Pack
from dataservice.wire.encoded import EncodedPack
from dataservice.wire.layout import Allocate, fresh
from dataservice.wire.messages import OpenSession, SessionOpened, StreamPack
from dataservice.wire.schema import decode, encode
from trainer_client.shelf import Shelf, Shelved

LOG = logging.getLogger(__name__)

WAIT_S = 5.0
"""Of a follower for a pack that the leader has not fetched yet."""
PAUSES_S = (1.0, 30.0)
"""First and longest; each wait in vain after another doubles it."""
FIRST_CONNECT_S = 3.0
"""Of a follower for a leader that has yet to listen: both learn of each other at the same time."""
CONNECT_PAUSE_S = 0.02
ASK_S = 0.5
"""Of a question: a leader that has not fetched the pack says so after this long."""
ANSWER_S = 3.0
"""For an answer that is due."""
ACCEPT_PAUSE_S = 1.0
"""Before connections are taken again when the process had no descriptor for one."""
TICK_S = 1.0
JOIN_S = 10.0


class Relay(Protocol):
    """Either end."""

    def take(self, request: StreamPack, *, allocate: Allocate = fresh) -> Pack | None:
        """The pack from the leader, in memory of `allocate`; None: fetch it."""
        ...

    def put(self, pack_id: str, pack: Pack) -> None:
        """What was fetched, for the others."""
        ...

    def close(self) -> None:
        """Idempotent, from any thread; makes a `take` under way return."""
        ...


def relay_of(opened: SessionOpened, request: OpenSession) -> Relay | None:
    """This process's end; None where it is the only reader of its rank on this host, or where the
    system has no such path."""
    peers = opened.host_peers
    if request.peer not in peers or len(peers) < 2:
        return None
    run = (request.job, opened.plan_digest, str(opened.session), request.run_id)
    name = relay_name(json.dumps(run), request.dp_rank, peers[0])
    if request.peer != peers[0]:
        return Follower(name)
    try:
        return Leader(name, followers=len(peers) - 1)
    except OSError as error:
        LOG.info("rank %d hands no packs on to its peers: %s", request.dp_rank, error)
        return None


def relay_name(run: str, dp_rank: int, leader: int) -> str:
    """As rpc.local.address_of wants it; `run`, of any length, is what no other job's processes
    have: packs of another session have the same ids."""
    digest = hashlib.sha256(run.encode()).hexdigest()[:32]
    return f"relay/{digest}/{dp_rank}/{leader}"


# ---- the leader ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Connection:
    """A follower."""

    socket: socket.socket
    wants: StreamPack | None = None
    until: float = 0.0
    """Monotonic time at which it is told that the pack has not come."""
    reads: Shelved | None = None
    """What it was given last: it may be read until the next request."""
    has: Segment | None = None
    """The one whose descriptor it got last."""


class Leader:
    def __init__(self, name: str, *, followers: int, max_bytes: int = MAX_SEGMENT_BYTES) -> None:
        """OSError where there is no such path, or another process has the name."""
        self._listener = new_socket()
        try:
            self._listener.setblocking(False)
            self._listener.bind(address_of(name))
            self._listener.listen(followers)
        except BaseException:
            self._listener.close()
            raise
        self._wakened, self._waker = socket.socketpair()
        self._wakened.setblocking(False)
        self._waker.setblocking(False)
        self.shelf = Shelf(readers=followers, max_bytes=max_bytes)
        self._most = followers
        self._connections: set[_Connection] = set()
        self._closing = False
        self._listens_at: float | None = None
        """Monotonic time, while no connections are taken."""
        self._selector = selectors.DefaultSelector()
        self._listen()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        _LEADERS.add(self)
        self._thread = threading.Thread(target=self._run, name=f"pack-{name[:12]}", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def take(self, request: StreamPack, *, allocate: Allocate = fresh) -> Pack | None:
        return None

    def put(self, pack_id: str, pack: Pack) -> None:
        """Copies the pack into shared memory: a few milliseconds."""
        arrays, meta = pack
        self.shelf.put(pack_id, EncodedPack(arrays, meta, compress=False))
        self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def drop_in_child(self) -> None:
        """After a fork: only the parent is to keep the name and the connections alive."""
        for sock in (self._listener, self._wakened, self._waker):
            sock.close()
        for connection in self._connections:
            connection.socket.close()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # it will look around anyway, or has ended

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._listens_at is not None and time.monotonic() >= self._listens_at:
                    self._listen()
                for key, _ in self._selector.select(self._pause_s()):
                    self._ready(key)
                for connection in list(self._connections):
                    self._serve(connection)
        except Exception:
            LOG.exception("packs are handed on to peers no more: each fetches its own")
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            for sock in (self._listener, self._wakened, self._waker):
                sock.close()
            self.shelf.close()

    def _pause_s(self) -> float:
        waits = [one.until for one in self._connections if one.wants is not None]
        return min(
            TICK_S, max(0.0, min(waits, default=TICK_S + time.monotonic()) - time.monotonic())
        )

    def _ready(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wakened:
            self._wakened.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            self._read(key.data)

    def _listen(self) -> None:
        self._listens_at = None
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            LOG.info("no peer can connect for %g s: %s", ACCEPT_PAUSE_S, error)
            self._selector.unregister(self._listener)
            self._listens_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        if not let_in(sock, is_full=len(self._connections) >= self._most):
            return
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        try:
            if not data or connection.wants is not None:
                raise WireError("the connection ended, or a request came before the last answer")
            request = decode(StreamPack, data, max_bytes=MAX_MESSAGE_BYTES)
        except WireError:
            self._drop(connection)
            return
        self._let_go(connection)
        connection.wants = request
        connection.until = time.monotonic() + min(request.wait_s, WAIT_S)

    def _serve(self, connection: _Connection) -> None:
        """Answers what can be answered now."""
        request = connection.wants
        if request is None:
            return
        pack = self.shelf.take(request.pack_id, request.peer)
        if pack is not None:
            connection.wants, connection.reads = None, pack
            fds = [] if connection.has is pack.segment else [pack.segment.fd]
            connection.has = pack.segment
            self._send(connection, Answer(size_bytes=pack.size_bytes), fds)
        elif self.shelf.is_gone(request.pack_id):
            self._refuse(connection, StorageError("it is not in memory any more"))
        elif time.monotonic() >= connection.until:
            self._refuse(connection, DeadlineExceeded("it has not been fetched yet"))

    def _refuse(self, connection: _Connection, error: DataServiceError) -> None:
        connection.wants = None
        self._send(connection, failure(error), [])

    def _send(self, connection: _Connection, answer: Answer, fds: list[int]) -> None:
        try:
            socket.send_fds(connection.socket, [encode(answer)], fds)
        except OSError:
            self._drop(connection)

    def _let_go(self, connection: _Connection) -> None:
        pack, connection.reads = connection.reads, None
        if pack is not None:
            self.shelf.let_go(pack)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._let_go(connection)


_LEADERS: weakref.WeakSet[Leader] = weakref.WeakSet()


def _after_fork() -> None:
    for leader in list(_LEADERS):
        leader.drop_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- a follower ---------------------------------------------------------------------------------


class Follower:
    """For one thread; a second one that comes meanwhile fetches by itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._client: LocalClient | None = None
        self._connected_before = False
        self._not_before = 0.0
        self._pause_s = 0.0
        """The last one, until a pack comes."""

    def put(self, pack_id: str, pack: Pack) -> None: ...

    def take(self, request: StreamPack, *, allocate: Allocate = fresh) -> Pack | None:
        if time.monotonic() < self._not_before or not self._busy.acquire(blocking=False):
            return None
        try:
            client = self._connect()
            if client is None:
                self._pause("its leader on this host does not listen")
                return None
            pack = self._ask(client, request, allocate)
            self._pause_s = 0.0
            return pack
        except StorageError:
            return None
        except DeadlineExceeded as error:
            self._pause(str(error))
        except (ServiceUnavailable, WireError) as error:
            self._disconnect()
            self._pause(str(error))
        finally:
            self._busy.release()
        return None

    def _ask(self, client: LocalClient, request: StreamPack, allocate: Allocate) -> Pack | None:
        """In short questions, so that a leader that does not move is found out soon."""
        until = time.monotonic() + min(request.wait_s, WAIT_S)
        while True:
            wait_s = max(0.0, min(ASK_S, until - time.monotonic()))
            try:
                return client.fetch(
                    replace(request, wait_s=wait_s), wait_s + ANSWER_S, allocate=allocate
                )
            except DeadlineExceeded:
                if client.closed or time.monotonic() >= until:
                    raise

    def close(self) -> None:
        self._stop.set()
        self._disconnect()

    def _connect(self) -> LocalClient | None:
        """None when nobody listens. Patient the first time only."""
        if self._client is not None:
            return self._client
        until = time.monotonic() + (0.0 if self._connected_before else FIRST_CONNECT_S)
        self._connected_before = True
        while not self._stop.is_set():
            client = local_client.connect(self._name, timeout_s=ANSWER_S)
            if client is not None:
                self._client = client
                if self._stop.is_set():
                    client.close()
                return client
            if time.monotonic() >= until:
                return None
            self._stop.wait(CONNECT_PAUSE_S)
        return None

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _pause(self, why: str) -> None:
        first, longest = PAUSES_S
        self._pause_s = min(longest, max(first, 2 * self._pause_s))
        self._not_before = time.monotonic() + self._pause_s
        if not self._stop.is_set():
            LOG.info("packs are fetched without the peer for %g s: %s", self._pause_s, why)
