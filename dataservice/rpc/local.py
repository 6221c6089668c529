"""What both ends of a host's shared-memory path agree on: its name, its messages, its segments.

A worker listens at a Unix socket beside its gRPC port. The socket takes sequenced packets, one a
message: HELLO once a client is let in, then a StreamPack request, an Answer, the next request. The
pack of an answer lies in the connection's segment (EncodedPack.write_into); its descriptor comes
with the first answer that uses it.

Invariants:
- the socket's name, made from the endpoint that clients know, is in Linux's abstract namespace: a
  process that ends, however, leaves no file and no name; another host or network namespace does
  not see it;
- either end turns away a peer of another user;
- a segment cannot shrink, so that no read of it can fail; it is rewritten only after the client
  asked again, and closed by the kernel with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataservice.errors import WireError
from dataservice.rpc.failures import ERROR_BODY_KEY, ERROR_CLASS_KEY, failure_of
from dataservice.wire.encoded import EncodedPack

HELLO = b"packs"
MAX_MESSAGE_BYTES = 16 << 10
"""Of a request or an answer, the text of an error with it."""
MAX_CONNECTIONS = 64
MAX_SEGMENT_BYTES = 256 << 20
"""Of all segments of a worker together, where one pack does not take more."""
_GRAIN_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The pack's bytes in the segment; or, with a `code`, a failure as rpc.failures has it."""

    size_bytes: int = 0
    code: str = ""
    """Name of a grpc.StatusCode."""
    details: str = ""
    error: str = ""
    """Class of dataservice.errors."""
    body: bytes = b""


def failure(error: Exception) -> Answer:
    """To a StreamPack that ended with `error`, as gRPC would answer it."""
    code, details, metadata = failure_of("StreamPack", error)
    told = dict(metadata)
    body = told.get(ERROR_BODY_KEY, b"")
    assert isinstance(body, bytes)
    return Answer(
        code=code.name, details=details, error=str(told.get(ERROR_CLASS_KEY, "")), body=body
    )


def new_socket() -> socket.socket:
    """OSError where there is no such path."""
    if sys.platform != "linux":
        raise OSError("shared memory between processes is made on Linux only")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def address_of(endpoint: str) -> str:
    """Of the worker that clients know by `endpoint`; too long a name is an OSError of the socket.

    The version is that of messages and segments: ends that differ do not meet.
    """
    return f"\0dataservice/packs/2/{endpoint}"


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def same_user(connection: socket.socket) -> bool:
    return peer_uid(connection) == os.geteuid()


def let_in(connection: socket.socket, *, is_full: bool) -> bool:
    """HELLO to a new client, unless there is no room or it is another user's: closed then."""
    try:
        connection.setblocking(False)
        if not is_full and same_user(connection):
            connection.send(HELLO)
            return True
    except OSError:
        pass
    connection.close()
    return False


def roomy(size_bytes: int) -> int:
    """Of a segment for a pack of `size_bytes`: most larger packs need no other."""
    return -(-(size_bytes + size_bytes // 4) // _GRAIN_BYTES) * _GRAIN_BYTES


class Segment:
    """The writing end of shared memory without a name."""

    def __init__(self, size_bytes: int) -> None:
        """OSError where the system gives none."""
        import fcntl  # which not every system has that can run a client

        self.size_bytes = size_bytes
        self.fd = os.memfd_create("dataservice-packs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._memory = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def write(self, pack: EncodedPack) -> None:
        pack.write_into(np.frombuffer(self._memory, np.uint8))

    def close(self) -> None:
        """Once."""
        os.close(self.fd)
        _unmap(self._memory)


class Window:
    """The reading end of a segment."""

    def __init__(self, fd: int) -> None:
        """WireError unless `fd` is memory that cannot shrink. The caller closes `fd`."""
        import fcntl

        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size_bytes = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size_bytes == 0:
                raise WireError("local pack: the worker's memory is not sealed")
            self._memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise WireError(f"local pack: the worker's memory cannot be read: {error}") from None

    def pack(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """The first `size_bytes`."""
        if not 0 < size_bytes <= len(self._memory):
            raise WireError(f"local pack: {size_bytes} bytes in {len(self._memory)}")
        return np.frombuffer(self._memory, np.uint8, count=size_bytes)

    def close(self) -> None:
        _unmap(self._memory)


def _unmap(memory: mmap.mmap) -> None:
    try:
        memory.close()
    except BufferError:
        pass  # an error on its way up holds a view: unmapped with that
