"""The folder of an index: who builds in it, who has it open, and what a killed build left there.

Invariants: a folder that holds other files is never built in, and only names as a build gives them
are ever removed; one build at a time; files that no manifest names any more are removed only while
nobody has the index open; who ends in any way lets go.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dataservice.errors import ConfigError
from dataservice.storage.tables import TEMPORARY_PREFIX

_SCRATCH_PREFIX = ".building-"
BUILDER_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.1
_LOCK_NAME = ".lock"
_OPEN_NAME = ".open"
_FOR_LOCKS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_DIGEST_DIGITS = 24


def name_by_digest(prefix: str, origins: str) -> str:
    """The name of an index file, which follows from all that its content follows from."""
    return prefix + hashlib.sha256(origins.encode()).hexdigest()[:_DIGEST_DIGITS]


def take_folder(index_dir: str) -> None:
    """Makes the folder where there is none. Raises ConfigError for one with files of others: an
    index would replace those of the same name, and could be taken for data itself."""
    try:
        os.makedirs(index_dir, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"index_dir {index_dir}: {error.filename} is no folder") from error
    names = os.listdir(index_dir)
    if _OPEN_NAME not in names:
        others = (name for name in sorted(names) if not name.startswith("."))
        found = next((n for n in others if os.path.isfile(os.path.join(index_dir, n))), None)
        if found is not None:
            raise ConfigError(
                f"index_dir {index_dir} is no index and holds other files, such as {found}; name a "
                f"folder of its own, such as {os.path.join(index_dir, 'index')}"
            )
        os.close(os.open(os.path.join(index_dir, _OPEN_NAME), _FOR_LOCKS, 0o644))


@contextmanager
def only_builder(index_dir: str) -> Iterator[None]:
    """Waits while another process builds: services that share an index look at it when they start.
    Raises ConfigError after BUILDER_WAIT_S."""
    until = time.monotonic() + BUILDER_WAIT_S
    with open(os.path.join(index_dir, _LOCK_NAME), "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ConfigError(
                        f"another process is building the index in {index_dir}, and was waited for "
                        f"for {BUILDER_WAIT_S:g} s: let it end, then start this again"
                    ) from None
            time.sleep(_LOOK_AGAIN_S)
        yield


@contextmanager
def scratch_folder(index_dir: str) -> Iterator[str]:
    """One that ends with the build; what a killed one left is removed first."""
    for name in os.listdir(index_dir):
        path = os.path.join(index_dir, name)
        if name.startswith(_SCRATCH_PREFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):  # a task of the killed build may still end
                os.unlink(path)
    with tempfile.TemporaryDirectory(
        prefix=_SCRATCH_PREFIX, dir=index_dir, ignore_cleanup_errors=True
    ) as path:
        yield path


def keep_open(index_dir: str, owner: object) -> None:
    """Files of the index stay as long as `owner` lives. Nothing is done where no lock can be had,
    as in a folder that cannot be written to, where nothing is removed either."""
    with suppress(OSError):
        fd = os.open(os.path.join(index_dir, _OPEN_NAME), _FOR_LOCKS, 0o644)
        weakref.finalize(owner, os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_unused(index_dir: str, prefixes: tuple[str, ...], used: set[str]) -> None:
    """Removes files whose names are one of the prefixes and a digest, with or without a suffix, and
    are not `used`, either whole or up to the first dot; not while somebody has the index open."""
    ours = re.compile(rf"({'|'.join(map(re.escape, prefixes))})[0-9a-f]{{{_DIGEST_DIGITS}}}(\..*)?")
    with open(os.path.join(index_dir, _OPEN_NAME), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        for name in os.listdir(index_dir):
            if ours.fullmatch(name) and not {name, name.split(".")[0]} & used:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(index_dir, name))
