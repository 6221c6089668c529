"""Reads by range with a deadline and retries, from the origin or from a staged copy of a shard.

Invariants: every call ends within its deadline, retries included; only failures that may pass are
retried (with capped full jitter); what a failed read raises is StorageError (StorageTimeout at the
deadline), never a bare OSError except FileNotFoundError from `stat`; a shard is read only while it
is what the index saw (size and mtime), else StaleIndexError.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import tenacity

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError, StorageTimeout
from dataservice.storage.backends import (
    Backend,
    FileCache,
    LocalBackend,
    ObjectStat,
    local_path,
    without_query,
)
from dataservice.storage.deadline import ReaderPool
from dataservice.storage.forks import renew_in_children
from dataservice.storage.packed.forward import ForwardReader
from dataservice.storage.packed.unpacking import PACKINGS
from dataservice.storage.remote import FsspecBackend

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO EAGAIN EBUSY EINTR ESTALE ETIMEDOUT ECONNRESET ECONNABORTED ECONNREFUSED EPIPE"
        " ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH EMFILE ENFILE ENOMEM EREMOTEIO"
    ).split()
    if hasattr(errno, name)
)
_SWEEP_S = 1.0
CACHED_BYTES = 1 << 20
"""Of a larger read the hand-over to another thread is no part worth saving."""


class ObjectStore(Protocol):
    """Names, sizes and ranges of objects. Every call takes at most `deadline_s` seconds."""

    def stat(self, url: str, *, deadline_s: float) -> ObjectStat:
        """Raises FileNotFoundError, StorageError."""

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        """Up to `size` bytes, fewer only at the end. Raises FileNotFoundError, StorageError."""

    def glob(self, pattern: str, *, deadline_s: float) -> dict[str, ObjectStat | None]:
        """As `Backend.glob`. Raises StorageError."""

    def list_folder(
        self, folder: str, prefix: str, *, deadline_s: float
    ) -> dict[str, ObjectStat | None] | None:
        """As `Backend.list_folder`. Raises StorageError."""


class Store:
    """The real ObjectStore: local paths and fsspec URLs."""

    def __init__(
        self,
        *,
        attempts: int = 4,
        threads: int = 16,
        local: Backend | None = None,
        remote: Backend | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._local = local or LocalBackend()
        self._remote = remote or FsspecBackend()
        self._pool = ReaderPool(threads=threads)
        self._attempts = attempts
        self._sleep = sleep
        self.retries = 0
        """Attempts after the first; threads may miss one of each other's."""

    @property
    def stuck_reads(self) -> int:
        return self._pool.stuck

    def backend(self, url: str) -> Backend:
        return self._remote if local_path(url) is None else self._local

    def stat(self, url: str, *, deadline_s: float) -> ObjectStat:
        backend = self.backend(url)
        return self.run(lambda: backend.stat(url), f"stat {url}", deadline_s)

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        backend = self.backend(url)
        return self.run(
            lambda: backend.read(url, offset, size)[0], f"read {url} at {offset}", deadline_s
        )

    def glob(self, pattern: str, *, deadline_s: float) -> dict[str, ObjectStat | None]:
        backend = self.backend(pattern)
        return self.run(lambda: backend.glob(pattern), f"list {pattern}", deadline_s)

    def list_folder(
        self, folder: str, prefix: str, *, deadline_s: float
    ) -> dict[str, ObjectStat | None] | None:
        backend = self.backend(folder)
        return self.run(
            lambda: backend.list_folder(folder, prefix), f"list {folder}{prefix}*", deadline_s
        )

    def run(self, call: Callable[[], T], what: str, deadline_s: float) -> T:
        """`call` with deadline and retries; see the module's invariants for what it raises."""
        ends = time.monotonic() + deadline_s

        def attempt() -> T:
            return self._pool.run(call, timeout_s=ends - time.monotonic(), what=what)

        try:
            try:
                return attempt()
            except (OSError, StorageError) as error:
                if not may_pass(error):
                    raise
                failed: list[Exception] = [error]
            return self._again(attempt, failed, ends)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{what}: {error}") from error

    def close(self) -> None:
        self._pool.close()
        self._local.close()
        self._remote.close()

    def _again(self, attempt: Callable[[], T], failed: list[Exception], ends: float) -> T:
        def next_attempt() -> T:
            if failed:
                raise failed.pop()
            self.retries += 1
            return attempt()

        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts)
            | tenacity.stop_before_delay(max(ends - time.monotonic(), 0.0)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=2.0),
            retry=tenacity.retry_if_exception(may_pass),
            sleep=self._sleep,
            reraise=True,
        )(next_attempt)


def may_pass(error: BaseException) -> bool:
    """True for a failure that another attempt may not see. A timeout already used its time."""
    if isinstance(error, StorageError):
        return not isinstance(error, StorageTimeout)
    return isinstance(error, OSError) and error.errno in _MAY_PASS


def read_chunks(
    store: ObjectStore, url: str, *, size_bytes: int, chunk_bytes: int, deadline_s: float
) -> Iterator[bytes]:
    """The object from front to end. Raises StorageError when it is shorter than `size_bytes`."""
    for offset in range(0, size_bytes, chunk_bytes):
        wanted = min(chunk_bytes, size_bytes - offset)
        data = store.read(url, offset, wanted, deadline_s=deadline_s)
        if len(data) != wanted:
            raise StorageError(f"{url} ends at {offset + len(data)}, expected {size_bytes} bytes")
        yield data


@functools.lru_cache(maxsize=4096)
def _staged_name(url: str, size_bytes: int, mtime_ns: int) -> str:
    digest = hashlib.sha256(f"{url}\0{size_bytes}\0{mtime_ns}".encode()).hexdigest()[:32]
    name = posixpath.basename(without_query(url))  # a query may hold a signature
    plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    return f"{digest}-{plain[-80:]}"


def staged_name(shard: ShardRef) -> str:
    """File name of a staged copy; another version of the same file has another name."""
    return _staged_name(shard.url, shard.size_bytes, shard.mtime_ns)


def staged_path(cache_dir: str, shard: ShardRef) -> str:
    return os.path.join(cache_dir, staged_name(shard))


class ShardReader:
    """Ranges of shards, from the staged copy where there is one. For threads, and after fork."""

    def __init__(
        self,
        cache_dir: str | None,
        *,
        deadline_s: float = 30.0,
        retries: int = 3,
        store: Store | None = None,
    ) -> None:
        self.cache_dir = cache_dir
        """May be set at any time; None reads origins only."""
        self._deadline_s = deadline_s
        self._store = store or Store(attempts=retries + 1)
        self._staged = FileCache()
        self._forward = ForwardReader(self._read_stored)
        self.after_fork()
        renew_in_children(self)
        self._next_sweep = 0.0
        self.origin_bytes = 0
        self.staged_bytes = 0

    def after_fork(self) -> None:
        self._count_lock = threading.Lock()

    @property
    def stuck_reads(self) -> int:
        return self._store.stuck_reads

    @property
    def retries(self) -> int:
        """Reads that failed in a way that may pass, and were tried again."""
        return self._store.retries

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
        """Exactly `size` bytes of the shard's content (unpacked, where it is gz, zst or zip).

        Raises StaleIndexError (naming the shard) when the shard is not what the index saw,
        StorageError when it cannot be had for now, StorageTimeout at the deadline, RecordError
        when it is packed and damaged.
        """
        _check_range(shard, offset, size)
        if (cached := self.read_cached(shard, offset, size)) is not None:
            return cached
        if shard.packing not in PACKINGS:
            data, staged = self._run(shard, offset, lambda: self._read_once(shard, offset, size))
            return self._count(data, staged)
        copy = self._run(shard, offset, lambda: self._read_staged(shard, offset, size))
        if copy is not None:
            return self._count(copy, True)
        return self._count(self._read_packed(shard, offset, size), False)

    @property
    def used_copies(self) -> bool:
        """Whether what was read so far may have come from staged copies, also from one that
        somebody else removed meanwhile."""
        return self.staged_bytes > 0

    def read_origin(self, shard: ShardRef, offset: int, size: int) -> bytes:
        """As `read`, past the staged copy: for bytes of it that turned out damaged."""
        _check_range(shard, offset, size)
        if shard.packing in PACKINGS:
            return self._count(self._read_packed(shard, offset, size), False)
        data = self._run(shard, offset, lambda: self._read_from_origin(shard, offset, size))
        return self._count(data, False)

    def drop_copy(self, shard: ShardRef) -> None:
        """Removes a damaged staged copy; the stager makes a new one when the shard is needed."""
        if self.cache_dir is not None:
            path = staged_path(self.cache_dir, shard)
            self._staged.discard(path)
            with contextlib.suppress(OSError):
                os.unlink(path)
            _LOG.warning("the staged copy of %s is damaged: removed", _name(shard))

    def sweep(self) -> int:
        """Close descriptors of evicted copies, so that their space is freed; returns how many."""
        return self._staged.discard_unlinked()

    def close(self) -> None:
        self._forward.close()
        self._store.close()
        self._staged.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self, shard: ShardRef, offset: int, call: Callable[[], T], deadline_s: float | None = None
    ) -> T:
        try:
            return self._store.run(
                call, f"read {_name(shard)} at {offset}", deadline_s or self._deadline_s
            )
        except FileNotFoundError as error:
            raise StorageError(f"{_name(shard)} is not there: {shard.url}") from error

    def _count(self, data: bytes, staged: bool) -> bytes:
        with self._count_lock:
            if staged:
                self.staged_bytes += len(data)
            else:
                self.origin_bytes += len(data)
        return data

    def read_cached(self, shard: ShardRef, offset: int, size: int) -> bytes | None:
        """As `read`, of what can be had at once; None for what has to be waited for or looked at
        more closely. Never blocks."""
        if shard.packing in PACKINGS or size > CACHED_BYTES:
            return None
        cache_dir = self.cache_dir
        if cache_dir is not None:
            if time.monotonic() >= self._next_sweep:
                return None
            found = self._staged.read_cached(staged_path(cache_dir, shard), offset, size)
            is_it = found is not None and found[1].size_bytes == shard.content_bytes
        else:
            backend = self._store.backend(shard.url)
            if not isinstance(backend, LocalBackend):
                return None
            found = backend.read_cached(shard.url, offset, size)
            is_it = found is not None and not _difference(shard, found[1])
        return self._count(found[0], cache_dir is not None) if found is not None and is_it else None

    def _read_once(self, shard: ShardRef, offset: int, size: int) -> tuple[bytes, bool]:
        data = self._read_staged(shard, offset, size)
        if data is not None:
            return data, True
        return self._read_from_origin(shard, offset, size), False

    def _read_packed(self, shard: ShardRef, offset: int, size: int) -> bytes:
        return self._forward.read(shard, offset, size, deadline_s=self._deadline_s)

    def _read_stored(self, shard: ShardRef, offset: int, size: int, deadline_s: float) -> bytes:
        """Of a packed shard, bytes of the file."""
        return self._run(
            shard, offset, lambda: self._read_from_origin(shard, offset, size), deadline_s
        )

    def _read_from_origin(self, shard: ShardRef, offset: int, size: int) -> bytes:
        backend = self._store.backend(shard.url)
        data, stat = backend.read(shard.url, offset, size)
        if _difference(shard, stat):
            backend.forget(shard.url)
            data, stat = backend.read(shard.url, offset, size)
        if changed := _difference(shard, stat):
            raise StaleIndexError(
                f"{_name(shard)} changed after it was indexed ({changed}); "
                "run `dataservice index` again"
            )
        if len(data) != size:
            raise StorageError(
                f"{_name(shard)}: {len(data)} of {size} bytes came at {offset}, though it is "
                f"still {shard.size_bytes} bytes long"
            )
        return data

    def _read_staged(self, shard: ShardRef, offset: int, size: int) -> bytes | None:
        cache_dir = self.cache_dir
        if cache_dir is None:
            return None
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            self.sweep()
        try:
            data, stat = self._staged.read(staged_path(cache_dir, shard), offset, size)
        except OSError:
            return None  # not staged, evicted, or the cache disk fails: the origin has it
        return data if len(data) == size and stat.size_bytes == shard.content_bytes else None


def _check_range(shard: ShardRef, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > shard.content_bytes:
        raise StaleIndexError(
            f"{_name(shard)} has {shard.content_bytes} bytes, but {size} are wanted at {offset}: "
            "the index does not belong to it; run `dataservice index` again"
        )


def _difference(shard: ShardRef, stat: ObjectStat) -> str:
    if stat.size_bytes != shard.size_bytes:
        return f"size {shard.size_bytes} -> {stat.size_bytes} bytes"
    if shard.mtime_ns and stat.mtime_ns and stat.mtime_ns != shard.mtime_ns:
        return f"mtime {shard.mtime_ns} -> {stat.mtime_ns} ns"
    return ""


def _name(shard: ShardRef) -> str:
    return f"shard {shard.source}/{shard.name}"
