"""From configured globs to files: a source's JSONL files and image roots, with sizes and mtimes.

Invariants: the same files give the same names in the same order on every machine; local paths are
absolute; a pattern that matches nothing is a ConfigError, not an empty source.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from dataservice.errors import ConfigError
from dataservice.storage.backends import ObjectStat, local_path
from dataservice.storage.objects import ObjectStore
from dataservice.storage.sources import SourceFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    url: str
    stat: ObjectStat


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceListing:
    files: SourceFiles
    root: str
    """Common parent folder of the JSONL files."""
    jsonl: tuple[FoundFile, ...]
    """By name."""
    roots: tuple[FoundFile, ...]
    """Zips and folders, in the order in which images are looked up."""


def list_source(files: SourceFiles, store: ObjectStore, *, deadline_s: float) -> SourceListing:
    """Raises ConfigError naming the pattern that matches nothing, and StorageError."""
    if not files.jsonl:
        raise ConfigError(f"source {files.name}: 'jsonl' names no file")
    jsonl: dict[str, FoundFile] = {}
    for pattern in files.jsonl:
        matches = _matches(pattern, store, deadline_s)
        if not matches:
            raise ConfigError(f"source {files.name}: no file matches jsonl pattern {pattern!r}")
        jsonl |= {file.url: file for file in matches}
    roots: dict[str, FoundFile] = {}
    for pattern in files.images:
        folder = _folder(pattern, store, deadline_s)
        matches = [folder] if folder else _matches(pattern, store, deadline_s)
        if not matches:
            raise ConfigError(
                f"source {files.name}: images {pattern!r} is no folder and matches no zip archive"
            )
        for file in matches:
            roots.setdefault(file.url, file)
    root = common_root(jsonl)
    return SourceListing(
        files=files,
        root=root,
        jsonl=tuple(sorted(jsonl.values(), key=lambda file: name_below(root, file.url))),
        roots=tuple(roots.values()),
    )


def zip_beside(jsonl: str, store: ObjectStore, *, deadline_s: float) -> FoundFile | None:
    """The archive of the same stem as a JSONL file, if there is one."""
    url = posixpath.splitext(jsonl)[0] + ".zip"
    try:
        stat = store.stat(url, deadline_s=deadline_s)
    except FileNotFoundError:
        return None
    return None if stat.is_folder else FoundFile(url=url, stat=stat)


def common_root(urls: Iterable[str]) -> str:
    """The longest folder that holds all files; without a slash at its end."""
    folders = [posixpath.dirname(url).split("/") for url in urls]
    shared = folders[0]
    for folder in folders[1:]:
        same = (a == b for a, b in zip(shared, folder, strict=False))
        shared = shared[: sum(takewhile(bool, same))]
    return "/".join(shared)


def name_below(root: str, url: str) -> str:
    """The part of `url` below `root`, or the whole of it when it lies elsewhere."""
    return url[len(root) + 1 :] if url.startswith(root + "/") else url


def _matches(pattern: str, store: ObjectStore, deadline_s: float) -> list[FoundFile]:
    return [
        FoundFile(url=url, stat=store.stat(url, deadline_s=deadline_s))
        for url in store.glob(pattern, deadline_s=deadline_s)
    ]


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
