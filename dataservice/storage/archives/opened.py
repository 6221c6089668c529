"""The archives that record files name images in, each opened once, and the finders over them.

Invariants: archives of the image roots stay open, one that belongs to a record file only as long as
its finder; what is bad as a whole is searched no further and says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from dataservice.errors import ArchiveError
from dataservice.storage.archives.access import ManyReads
from dataservice.storage.archives.archive import Archive
from dataservice.storage.archives.finder import Group, ImageFinder
from dataservice.storage.archives.folder import Folder
from dataservice.storage.archives.lookup import Lookup
from dataservice.storage.fingerprints import ArchiveIdentity, identity_of
from dataservice.storage.index_folder import name_by_digest
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles

LOOKUP_PREFIX = "lookup-"

Step = Archive | Folder | ArchiveError


class _Searched(NamedTuple):
    """Places in their order, and of those that are bad as a whole why."""

    steps: list[Group | Folder]
    unreadable: list[str]


class Archives:
    """Close it when done. With no `index_dir` nothing is written."""

    def __init__(self, store: Store, index_dir: str | None, *, deadline_s: float) -> None:
        self._store = store
        self._index_dir = index_dir
        self._deadline_s = deadline_s
        self._reads = ManyReads(store, deadline_s=deadline_s)
        self._roots: dict[str, Step] = {}
        self._beside: dict[str, Step] = {}
        self._shared: dict[tuple[str, ...], _Searched] = {}

    def finder(
        self,
        files: SourceFiles,
        beside: Sequence[FoundFile],
        roots: Sequence[FoundFile],
        *,
        lookups: str | None = None,
    ) -> ImageFinder:
        """For a record file of `files` with archives of its own stem `beside` it.

        `lookups` is a folder with files of `lookup_files`. Raises StorageError.
        """
        # All roots, also where one of them is beside the file: record files share their lookup.
        key = tuple(file.url for file in roots)
        if key not in self._shared:
            self._shared[key] = self._searched([self.root(file) for file in roots], lookups)
        shared = self._shared[key]
        self._beside = {file.url: self.beside(file) for file in beside}
        own = self._searched(list(self._beside.values()), lookups)
        return ImageFinder(
            [*own.steps, *shared.steps],
            self._reads,
            strip_prefix=files.strip_prefix,
            add_prefix=files.add_prefix,
            unreadable=list(dict.fromkeys((*own.unreadable, *shared.unreadable))),
        )

    def root(self, file: FoundFile) -> Step:
        """An image root; kept open. Raises StorageError."""
        if file.url not in self._roots:
            self._roots[file.url] = self.beside(file)
        return self._roots[file.url]

    def beside(self, file: FoundFile) -> Step:
        """An archive that belongs to a record file; not kept open. Raises StorageError."""
        if file.stat.is_folder:
            return Folder(file.url)
        if file.url in self._roots:
            return self._roots[file.url]
        try:
            return Archive(file, self._store, self._index_dir, deadline_s=self._deadline_s)
        except ArchiveError as error:
            return ArchiveError(f"{file.url}: {error.reason}")

    def identity(self, file: FoundFile) -> ArchiveIdentity | None:
        """Of an image root, or of an archive beside the last finder's record file."""
        return identity_of(file, self._beside.get(file.url) or self.root(file))

    def groups(self, roots: Sequence[FoundFile]) -> list[list[Archive]]:
        """The archives that `finder` searches together, those beside a record file left out."""
        steps = [self.root(file) for file in roots]
        usable = [step for step in steps if not isinstance(step, ArchiveError)]
        return [
            [step for step in group if isinstance(step, Archive)]
            for is_folder, group in groupby(usable, key=lambda step: isinstance(step, Folder))
            if not is_folder
        ]

    def close(self) -> None:
        self._reads.close()

    def _searched(self, opened: Sequence[Step], lookups: str | None) -> _Searched:
        usable = [step for step in opened if not isinstance(step, ArchiveError)]
        steps: list[Group | Folder] = []
        for is_folder, group in groupby(usable, key=lambda step: isinstance(step, Folder)):
            if is_folder:
                steps += [step for step in group if isinstance(step, Folder)]
            else:
                archives = [step for step in group if isinstance(step, Archive)]
                steps.append(self._group(archives, lookups))
        return _Searched(steps, [str(step) for step in opened if isinstance(step, ArchiveError)])

    def _group(self, archives: list[Archive], lookups: str | None) -> Group:
        path = os.path.join(lookups, lookup_name(archives)) if lookups else ""
        lookup = Lookup.open(path) if os.path.exists(path) else Lookup.of(archives)
        return Group(archives, lookup)


def lookup_name(archives: Sequence[Archive]) -> str:
    """File name of the lookup of archives that follow one another: LOOKUP_PREFIX and a digest."""
    keys = "\0".join(archive.key for archive in archives)
    return name_by_digest(LOOKUP_PREFIX, keys)
