"""From configured globs to files: a source's record files and image roots, with sizes and mtimes.

Invariants: the same files give the same names in the same order on every machine; local paths are
absolute; a pattern that matches nothing is a ConfigError, not an empty source; so is a file name
that is not UTF-8.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

from dataservice.core.packspec import ShardRef
from dataservice.errors import ConfigError, StorageError
from dataservice.masking import mask_urls
from dataservice.storage.backends import ObjectStat, local_path
from dataservice.storage.objects import ObjectStore
from dataservice.storage.sources import SourceFiles

_LOG = logging.getLogger(__name__)

ARCHIVE_SUFFIXES = (".zip", ".tar")
"""In the order in which archives of a record file's stem are searched."""

_PLACES_SUFFIX = ".idx"
"""Of the file with the places of records that Energon writes beside a .jsonl."""
_PACKED = (".gz", ".zst", ".zip")
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_PART_OF_ARCHIVE = re.compile(r"\.(zip|tar|tar\.gz|tgz)\.\w+$|\.z\d\d+$", re.IGNORECASE)
_SIDE_BY_SIDE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    url: str
    stat: ObjectStat

    def shard(self, source: str, name: str, packing: str = "") -> ShardRef:
        """As a shard whose unpacked size is not known."""
        return ShardRef(
            source=source,
            name=name,
            url=self.url,
            size_bytes=self.stat.size_bytes,
            mtime_ns=self.stat.mtime_ns,
            packing=packing,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceListing:
    files: SourceFiles
    root: str
    """Common parent folder of the record files."""
    records: tuple[FoundFile, ...]
    """By name."""
    beside: tuple[tuple[FoundFile, ...], ...]
    """By record file: the archives of its stem."""
    roots: tuple[FoundFile, ...]
    """Archives and folders, in the order in which images are looked up."""


def list_sources(
    sources: Sequence[SourceFiles], store: ObjectStore, *, deadline_s: float, leave_out: str = ""
) -> list[SourceListing]:
    """As `list_source`; ConfigError also for a name that two sources have."""
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"sources: a name is used twice: {', '.join(names)}")
    return [
        list_source(source, store, deadline_s=deadline_s, leave_out=leave_out) for source in sources
    ]


def list_source(
    files: SourceFiles, store: ObjectStore, *, deadline_s: float, leave_out: str = ""
) -> SourceListing:
    """`leave_out` is a folder of this machine, of an index, where no records are.

    Raises ConfigError naming the pattern that matches nothing, and StorageError.
    """
    if not files.records:
        raise ConfigError(f"source {files.name}: 'records' names no file")
    records: dict[str, FoundFile] = {}
    for pattern in files.records:
        found = store.glob(pattern, deadline_s=deadline_s)
        urls = [url for url in found if not url.endswith(_PLACES_SUFFIX)]
        if leave_out:
            own = os.path.join(os.path.abspath(leave_out), "")
            urls = [url for url in urls if not url.startswith(own)]
        _check_names(files.name, urls)
        matches = _found(urls, store, deadline_s)
        if not matches:
            raise ConfigError(f"source {files.name}: no file matches records pattern {pattern!r}")
        records |= {file.url: file for file in matches}
    root = common_root(records)
    ordered = tuple(sorted(records.values(), key=lambda file: name_below(root, file.url)))
    return SourceListing(
        files=files,
        root=root,
        records=ordered,
        beside=archives_beside([file.url for file in ordered], store, deadline_s=deadline_s),
        roots=_roots(files, store, deadline_s),
    )


def archives_beside(
    urls: Sequence[str], store: ObjectStore, *, deadline_s: float
) -> tuple[tuple[FoundFile, ...], ...]:
    """Of each record file, the archives of the same stem that there are: its own images. A store
    that does not let them be looked at, as S3 says of what is not there to who may not list a
    bucket, has none."""
    wanted = [record_stem(url) + suffix for url in urls for suffix in ARCHIVE_SUFFIXES]
    forbidden: list[StorageError] = []
    stats = _stats(wanted, store, deadline_s, forbidden)
    if forbidden:
        _LOG.warning(
            "%d archives beside record files are taken as not there, as they may not be looked at, "
            "such as %s",
            len(forbidden),
            forbidden[0],
        )
    found = [
        None if stat is None or stat.is_folder else FoundFile(url=url, stat=stat)
        for url, stat in zip(wanted, stats, strict=True)
    ]
    count = len(ARCHIVE_SUFFIXES)
    return tuple(
        tuple(file for file in found[start : start + count] if file is not None)
        for start in range(0, len(found), count)
    )


def record_stem(url: str) -> str:
    """The name without what says that it is a record file: "a.jsonl.gz" -> "a"."""
    stem, suffix = posixpath.splitext(url)
    return posixpath.splitext(stem)[0] if suffix.lower() in _PACKED else stem


def common_root(urls: Iterable[str]) -> str:
    """The longest folder that holds all files; without a slash at its end."""
    folders = [posixpath.dirname(mask_urls(url)).split("/") for url in urls]
    shared = folders[0]
    for folder in folders[1:]:
        same = (a == b for a, b in zip(shared, folder, strict=False))
        shared = shared[: sum(takewhile(bool, same))]
    return "/".join(shared)


def name_below(root: str, url: str) -> str:
    """The part of `url` below `root`, or the whole of it when it lies elsewhere; no secrets."""
    url = mask_urls(url)
    return url[len(root) + 1 :] if url.startswith(root + "/") else url


def files_key(files: Iterable[FoundFile]) -> str:
    """Names these versions of these files in this order."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat
        digest.update(f"{file.url}\0{stat.size_bytes}\0{stat.mtime_ns}\0".encode())
    return digest.hexdigest()


def _roots(files: SourceFiles, store: ObjectStore, deadline_s: float) -> tuple[FoundFile, ...]:
    roots: dict[str, FoundFile] = {}
    for pattern in files.images:
        folder = _folder(pattern, store, deadline_s)
        matches = [folder] if folder else _archives(files.name, pattern, store, deadline_s)
        for file in matches:
            roots.setdefault(file.url, file)
    return tuple(roots.values())


def _archives(source: str, pattern: str, store: ObjectStore, deadline_s: float) -> list[FoundFile]:
    urls = store.glob(pattern, deadline_s=deadline_s)
    archives = [url for url in urls if url.lower().endswith(ARCHIVE_SUFFIXES)]
    if not archives:
        raise ConfigError(
            f"source {source}: images {pattern!r} is no folder and matches no zip or tar archive"
            f"{_remedy(urls)}"
        )
    _check_names(source, archives)
    return _found(archives, store, deadline_s)


def _remedy(urls: Sequence[str]) -> str:
    """What to do with files that are almost archives."""
    if any(url.lower().endswith(_COMPRESSED_TARS) for url in urls):
        return "; a compressed tar cannot be read by place, unpack it to .tar"
    if parts := [url for url in urls if _PART_OF_ARCHIVE.search(url)]:
        return (
            f"; {posixpath.basename(parts[0])} is a part of a split archive, join the parts first "
            "(cat x.zip.* > x.zip, or of x.z01, x.z02 ...: zip -s 0 x.zip --out whole.zip)"
        )
    return ""


def _check_names(source: str, urls: Sequence[str]) -> None:
    for url in urls:
        if not url.isprintable() and re.search("[\ud800-\udfff]", url):
            raise ConfigError(f"source {source}: the name of {url!r} is not UTF-8; rename the file")


def _found(urls: Sequence[str], store: ObjectStore, deadline_s: float) -> list[FoundFile]:
    stats = _stats(urls, store, deadline_s)
    return [
        FoundFile(url=url, stat=stat)
        for url, stat in zip(urls, stats, strict=True)
        if stat is not None
    ]


def _stats(
    urls: Sequence[str],
    store: ObjectStore,
    deadline_s: float,
    forbidden: list[StorageError] | None = None,
) -> list[ObjectStat | None]:
    """None for what is not there; also for what may not be looked at, where `forbidden` takes
    that."""

    def stat(url: str) -> ObjectStat | None:
        try:
            return store.stat(url, deadline_s=deadline_s)
        except FileNotFoundError:
            return None
        except StorageError as error:
            cause = error.__cause__
            if forbidden is None or not isinstance(cause, OSError) or cause.errno != errno.EACCES:
                raise
            forbidden.append(error)
            return None

    if len(urls) < _SIDE_BY_SIDE:
        return [stat(url) for url in urls]
    with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="listing") as pool:
        return list(pool.map(stat, urls))


def _folder(pattern: str, store: ObjectStore, deadline_s: float) -> FoundFile | None:
    path = local_path(pattern)
    url = pattern.rstrip("/") if path is None else os.path.abspath(path)
    try:
        stat = store.stat(url, deadline_s=deadline_s)
    except FileNotFoundError:
        return None
    if not stat.is_folder:
        return None
    return FoundFile(url=url, stat=ObjectStat(size_bytes=0, mtime_ns=0, is_folder=True))
