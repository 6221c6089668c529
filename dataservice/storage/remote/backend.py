"""Every URL that fsspec knows: S3 and HTTP by ranges of our own, other stores by fsspec's calls.

Invariants: no listing that a client keeps is used; credentials come from the environment and
fsspec's config alone, and no text of an error or of the clients' logs shows one; a call to S3 or
HTTP ends within `longest_s`; safe for threads, and after a fork.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Protocol, TypeVar

from dataservice.storage.backends import ObjectStat
from dataservice.storage.forks import renew_in_children
from dataservice.storage.remote import http, s3
from dataservice.storage.remote.failures import translated
from dataservice.storage.remote.loop import LoopThread, keep_unused
from dataservice.storage.remote.ranges import version_stat

T = TypeVar("T")
Listed = Callable[[dict[str, Any]], ObjectStat | None]
"""What an entry of a listing says of a file; None: not enough."""


class RangedStore(Protocol):
    """Reads ranges by an fsspec file system's own session, in its event loop."""

    def options(self, configured: dict[str, Any]) -> dict[str, Any]: ...

    async def stat(self, filesystem: Any, path: str) -> ObjectStat: ...

    def listed(self, info: dict[str, Any]) -> ObjectStat | None: ...

    async def list_folder(
        self, filesystem: Any, path: str, prefix: str
    ) -> list[dict[str, Any]] | None: ...

    async def read(
        self, filesystem: Any, path: str, offset: int, size: int
    ) -> tuple[bytes, ObjectStat]: ...


_RANGED: dict[str, RangedStore] = {"http": http, "https": http, "s3": s3, "s3a": s3}
_STAT_KEPT_S = 10.0
_CHATTY = ("aiobotocore", "aiohttp", "botocore", "fsspec", "s3fs", "urllib3")


class FsspecBackend:
    """A store's own client library must be installed; objects.py adds deadlines and retries."""

    def __init__(self, *, longest_s: float = 60.0) -> None:
        self._longest_s = longest_s
        self._loop = LoopThread()
        self._start_anew()
        renew_in_children(self)

    def after_fork(self) -> None:
        keep_unused(self._systems, self._others)
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._systems: dict[tuple[str, str], Any] = {}
        self._others: dict[int, Any] = {}
        self._seen: dict[str, tuple[float, ObjectStat]] = {}

    def stat(self, url: str) -> ObjectStat:
        """Raises FileNotFoundError, StorageError for what may pass, OSError."""
        ranged = _ranged(url)
        if ranged:
            return self._await(url, ranged.stat)
        return self._other(url, _stat_by_fsspec)

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        if size <= 0:
            return b"", self.stat(url)
        ranged = _ranged(url)
        if ranged:
            return self._await(url, lambda fs, path: ranged.read(fs, path, offset, size))
        stat = self._stat_once(url)
        end = min(offset + size, stat.size_bytes)
        if offset >= end:
            return b"", stat
        data = self._other(url, lambda fs, path: fs.cat_file(path, start=offset, end=end))
        return bytes(data), stat

    def forget(self, url: str) -> None:
        self._seen.pop(url, None)

    def glob(self, pattern: str) -> dict[str, ObjectStat | None]:
        try:
            stat = self.stat(pattern)
            if not stat.is_folder:
                return {pattern: stat}
        except FileNotFoundError:
            pass
        ranged = _ranged(pattern)
        if ranged:
            return self._await(pattern, lambda fs, path: _glob_ranged(fs, path, ranged.listed))
        return self._other(pattern, _glob_by_fsspec)

    def list_folder(self, folder: str, prefix: str) -> dict[str, ObjectStat | None] | None:
        if "::" in folder:
            return None
        ranged = _ranged(folder)
        try:
            if ranged:
                found = self._await(folder, lambda fs, path: ranged.list_folder(fs, path, prefix))
            else:
                found = self._other(folder, _list_by_fsspec)
        except FileNotFoundError:
            return {}
        if found is None:
            return None
        listed = ranged.listed if ranged else _listed_by_fsspec
        return {
            info["name"].rpartition("/")[2]: listed(info)
            for info in found
            if info["type"] != "directory"
        }

    def close(self) -> None:
        systems = list(self._systems.values())

        async def farewell() -> None:
            for filesystem in systems:
                session = await filesystem.set_session()
                await session.close()

        self._loop.close(farewell)
        self._systems.clear()
        self._seen.clear()

    def _await(self, url: str, call: Callable[[Any, str], Coroutine[Any, Any, T]]) -> T:
        """What `call(filesystem, path)` gives, run in our loop; its errors as errors of ours."""
        try:
            filesystem, path = self._system(url)
            return self._loop.run(lambda: call(filesystem, path), timeout_s=self._longest_s)
        except Exception as error:
            raise translated(url, error) from None

    def _other(self, url: str, call: Callable[[Any, str], T]) -> T:
        try:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(url)
            self._others[id(filesystem)] = filesystem
            return call(filesystem, path)
        except Exception as error:
            raise translated(url, error) from None

    def _system(self, url: str) -> tuple[Any, str]:
        import fsspec

        protocol = url.partition("://")[0]
        made_by = fsspec.get_filesystem_class(protocol)
        of_url = made_by._get_kwargs_from_urls(url)
        key = (protocol, repr(sorted(of_url.items())))
        with self._lock:
            filesystem = self._systems.get(key)
            if filesystem is None:
                _silence_debug_logs()
                of_client = _RANGED[protocol].options(fsspec.config.apply_config(made_by, {}))
                filesystem = made_by(
                    asynchronous=True, skip_instance_cache=True, **of_url, **of_client
                )
                filesystem.retries = 1
                self._systems[key] = filesystem
        return filesystem, made_by._strip_protocol(url)

    def _stat_once(self, url: str) -> ObjectStat:
        now = time.monotonic()
        kept = self._seen.get(url)
        if kept is not None and now < kept[0] + _STAT_KEPT_S:
            return kept[1]
        stat = self.stat(url)
        if len(self._seen) >= 4096:
            self._seen.clear()
        self._seen[url] = (now, stat)
        return stat


def _ranged(url: str) -> RangedStore | None:
    """What reads such URLs; None: fsspec's own calls do."""
    return None if "::" in url else _RANGED.get(url.partition("://")[0])


async def _glob_ranged(filesystem: Any, path: str, listed: Listed) -> dict[str, ObjectStat | None]:
    return _files_of(filesystem, await filesystem._glob(path, detail=True), listed)


def _glob_by_fsspec(filesystem: Any, path: str) -> dict[str, ObjectStat | None]:
    filesystem.invalidate_cache()
    return _files_of(filesystem, filesystem.glob(path, detail=True), _listed_by_fsspec)


def _files_of(
    filesystem: Any, found: dict[str, dict[str, Any]], listed: Listed
) -> dict[str, ObjectStat | None]:
    files = {
        filesystem.unstrip_protocol(name): listed(info)
        for name, info in found.items()
        if info["type"] != "directory"
    }
    return dict(sorted(files.items()))


def _list_by_fsspec(filesystem: Any, path: str) -> list[dict[str, Any]] | None:
    filesystem.invalidate_cache()
    try:
        found: list[dict[str, Any]] = filesystem.ls(path, detail=True)
    except NotImplementedError:
        return None
    return found


def _listed_by_fsspec(info: dict[str, Any]) -> ObjectStat | None:
    """None for a link too: it may be told of in place of what it points at."""
    return _stat_of(info) if info["type"] == "file" and info.get("size") is not None else None


def _stat_by_fsspec(filesystem: Any, path: str) -> ObjectStat:
    filesystem.invalidate_cache()
    info = filesystem.info(path)
    if info.get("type") == "directory":
        return ObjectStat(size_bytes=0, mtime_ns=0, is_folder=True)
    return _stat_of(info)


def _stat_of(info: dict[str, Any]) -> ObjectStat:
    """The same for a time in seconds, as some stores list it, and for the datetime of a file."""
    changed = next(filter(None, map(info.get, _CHANGED)), None)
    etag = str(info.get("etag") or info.get("ETag") or "")
    size = int(info.get("size") or 0)
    seconds = changed.timestamp() if isinstance(changed, datetime) and not etag else changed
    if isinstance(seconds, int | float):
        return ObjectStat(size_bytes=size, mtime_ns=int(seconds * 1_000_000) * 1000)
    return version_stat(size, changed if isinstance(changed, datetime) else None, etag)


_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def _silence_debug_logs() -> None:
    """At DEBUG the clients log requests with what signs them; whoever wants that sets a level."""
    for name in _CHATTY:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
