"""From the names on the command line to files and what kind each is.

Invariants: names are taken in the order given, the files of a folder sorted; hidden files of a
folder and what is no regular file (a pipe would hang) are left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataservice.errors import ConfigError, StorageError
from dataservice.linting.kinds import FileKind, kind_by_name, kind_of
from dataservice.storage.backends import ObjectStat, local_path
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    name: str
    """As it was given, or below a folder that was given."""
    file: FoundFile
    kind: FileKind
    problem: str | None
    """Why it cannot be read."""


def find(name: str, store: ObjectStore, *, deadline_s: float) -> FoundFile:
    """A file or folder. Raises ConfigError when there is none, StorageError."""
    path = local_path(name)
    try:
        if path is not None:
            mode = os.stat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(f"{name} is neither a file nor a folder")
            name = os.path.abspath(path)
        return FoundFile(url=name, stat=store.stat(name, deadline_s=deadline_s))
    except FileNotFoundError:
        raise ConfigError(f"no such file: {name}") from None


def targets(
    given: Sequence[tuple[str, FoundFile | StorageError]], store: ObjectStore, *, deadline_s: float
) -> Iterator[Target]:
    """The files named, and those below the folders named; an error says why there is no file."""
    for name, file in given:
        if isinstance(file, StorageError):
            yield unread(name, file)
        elif not file.stat.is_folder:
            yield _target(name, file, store, deadline_s)
        elif local_path(file.url) is None:
            raise ConfigError(f"{name} is a remote folder; name its files")
        else:
            for path in below(name):
                try:
                    yield _target(path, find(path, store, deadline_s=deadline_s), store, deadline_s)
                except (StorageError, ConfigError) as error:
                    yield unread(path, error)


def unread(name: str, error: Exception) -> Target:
    """A file that is out of reach, as its name says what it is."""
    nothing = FoundFile(url=name, stat=ObjectStat(size_bytes=0, mtime_ns=0))
    problem = f"could not be read: {error}"
    return Target(name=name, file=nothing, kind=kind_by_name(name) or "image", problem=problem)


def _target(name: str, file: FoundFile, store: ObjectStore, deadline_s: float) -> Target:
    try:
        kind = kind_of(
            name,
            lambda offset, size: store.read(file.url, offset, size, deadline_s=deadline_s),
            file.stat.size_bytes,
        )
    except (StorageError, FileNotFoundError) as error:
        return unread(name, error)
    return Target(name=name, file=file, kind=kind, problem=None)


def below(folder: str) -> Iterator[str]:
    """The files of a folder of this machine and of those in it, sorted."""
    for parent, folders, names in os.walk(local_path(folder) or folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path
