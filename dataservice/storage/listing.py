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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TypeVar

from dataservice.core.packspec import ShardRef
from dataservice.errors import ConfigError, StorageError
from dataservice.masking import mask_urls
from dataservice.storage.backends import ObjectStat, local_path, without_query
from dataservice.storage.objects import ObjectStore
from dataservice.storage.packed.unpacking import PACKINGS, packing_of
from dataservice.storage.sources import SourceFiles

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

ARCHIVE_SUFFIXES = (".zip", ".tar")
"""In the order in which archives of a record file's stem are searched."""

_PLACES_SUFFIX = ".idx"
"""Of the file with the places of records that Energon writes beside a .jsonl."""
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
        found = {u: stat for u, stat in found.items() if not u.endswith(_PLACES_SUFFIX)}
        if leave_out:
            own = os.path.join(os.path.abspath(leave_out), "")
            found = {u: stat for u, stat in found.items() if not u.startswith(own)}
        _check_names(files.name, found)
        matches = _settled(found, store, deadline_s)
        if not matches:
            raise ConfigError(
                f"source {files.name}: no file matches records pattern {pattern!r}"
                f"{_folder_remedy(pattern, store, deadline_s)}"
            )
        records |= matches
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
    wanted = [[record_stem(url) + suffix for suffix in ARCHIVE_SUFFIXES] for url in urls]
    forbidden: list[StorageError] = []
    likely = _likely(list(chain.from_iterable(wanted)), store, deadline_s)
    found = _settled(likely, store, deadline_s, forbidden)
    if forbidden:
        _LOG.warning(
            "%d archives beside record files are taken as not there, as they may not be looked at, "
            "such as %s",
            len(forbidden),
            forbidden[0],
        )
    return tuple(
        tuple(found[url] for url in some if url in found and not found[url].stat.is_folder)
        for some in wanted
    )


def record_stem(url: str) -> str:
    """The name without what says that it is a record file: "a.jsonl.gz" -> "a"; no query."""
    stem = posixpath.splitext(without_query(url))[0]
    return posixpath.splitext(stem)[0] if packing_of(url) in PACKINGS else stem


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
    found = store.glob(pattern, deadline_s=deadline_s)
    archives = {url: stat for url, stat in found.items() if url.lower().endswith(ARCHIVE_SUFFIXES)}
    if not archives:
        raise ConfigError(
            f"source {source}: images {pattern!r} is no folder and matches no zip or tar archive"
            f"{_remedy(list(found))}"
        )
    _check_names(source, archives)
    return list(_settled(archives, store, deadline_s).values())


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


def _check_names(source: str, urls: Iterable[str]) -> None:
    for url in urls:
        if not url.isprintable() and re.search("[\ud800-\udfff]", url):
            raise ConfigError(f"source {source}: the name of {url!r} is not UTF-8; rename the file")


def _likely(
    urls: Sequence[str], store: ObjectStore, deadline_s: float
) -> dict[str, ObjectStat | None]:
    """Those that listings of their folders have, or are not known to lack."""
    if len(urls) <= _SIDE_BY_SIDE:  # fewer requests than the pages of a large folder
        return dict.fromkeys(urls)
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for url in urls:
        folder, slash, name = url.rpartition("/")
        folders[folder + slash].append(name)

    def listed(folder: str) -> dict[str, ObjectStat | None]:
        names = folders[folder]
        prefix = posixpath.commonprefix(names)
        try:
            found = store.list_folder(folder, prefix, deadline_s=deadline_s)
        except StorageError as error:
            if not _is_forbidden(error):
                raise
            found = None
        if found is None:
            found = dict.fromkeys(names)
        return {folder + name: found[name] for name in names if name in found}

    likely: dict[str, ObjectStat | None] = {}
    for found in _side_by_side(listed, list(folders)):
        likely |= found
    return likely


def _settled(
    listed: Mapping[str, ObjectStat | None],
    store: ObjectStore,
    deadline_s: float,
    forbidden: list[StorageError] | None = None,
) -> dict[str, FoundFile]:
    """By URL, what is there. A stat from a listing counts if a sample of each bucket is what the
    store says of the file itself, as every read will: times in listings may be rounded otherwise.
    `forbidden` as in `_stats`."""
    samples = {tuple(url.split("/")[:3]): url for url, stat in listed.items() if stat is not None}
    told = _stats(list(samples.values()), store, deadline_s, forbidden)
    trusted = all(stat == listed[url] for url, stat in told.items())
    asked = [url for url, stat in listed.items() if stat is None or not trusted]
    asked = [url for url in asked if url not in told]
    stats = {**listed, **told, **_stats(asked, store, deadline_s, forbidden)}
    return {url: FoundFile(url=url, stat=stat) for url, stat in stats.items() if stat is not None}


def _stats(
    urls: Sequence[str],
    store: ObjectStore,
    deadline_s: float,
    forbidden: list[StorageError] | None,
) -> dict[str, ObjectStat | None]:
    """None for what is not there; also for what may not be looked at, where `forbidden` takes
    that."""

    def stat(url: str) -> ObjectStat | None:
        try:
            return store.stat(url, deadline_s=deadline_s)
        except FileNotFoundError:
            return None
        except StorageError as error:
            if forbidden is None or not _is_forbidden(error):
                raise
            forbidden.append(error)
            return None

    return dict(zip(urls, _side_by_side(stat, urls), strict=True))


def _is_forbidden(error: StorageError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EACCES


def _side_by_side(call: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    if len(urls) < _SIDE_BY_SIDE:
        return [call(url) for url in urls]
    with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="listing") as pool:
        return list(pool.map(call, urls))


def _folder_remedy(pattern: str, store: ObjectStore, deadline_s: float) -> str:
    if _folder(pattern, store, deadline_s) is None:
        return ""
    return f"; it is a folder: name the files in it, such as {pattern.rstrip('/')}/*.jsonl"


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
