"""Where the images of one record file are, and how large: the archive of its own stem first, then
the image roots in their order.

Invariants: a name never leaves its root; the first place that has a name counts; a name may say
its archive ("x.zip@/a.jpg", "x.zip/a.jpg"), which must be one of those searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from dataservice.errors import DataError, RecordError, StorageError
from dataservice.storage.archives.access import ManyReads
from dataservice.storage.archives.archive import Archive
from dataservice.storage.archives.folder import Folder
from dataservice.storage.archives.lookup import Lookup
from dataservice.storage.archives.names import in_archive, is_archive, searched_names, shown
from dataservice.storage.backends import ObjectStat

T = TypeVar("T")

Size = tuple[int, int]


class Place(msgspec.Struct, frozen=True, gc=False):
    """Of an image. A msgspec struct, like a record: there are as many."""

    archive: int
    """Number in `ImageFinder.archives`."""
    member: int
    """Row of the archive's member table; -1 in a folder."""
    name: str
    """As it was searched for."""
    stat: ObjectStat | None
    """Of a folder's file."""


class MissingImage(RecordError):
    """No archive or folder has an image of that name."""


class Group(NamedTuple):
    """Archives that are searched together, as they follow one another."""

    archives: Sequence[Archive]
    lookup: Lookup


class ImageFinder:
    """One thread at a time."""

    def __init__(
        self,
        steps: Sequence[Group | Folder],
        reads: ManyReads,
        *,
        strip_prefix: str = "",
        add_prefix: str = "",
        unreadable: Sequence[str] = (),
    ) -> None:
        """`unreadable` says of each archive that is bad as a whole why."""
        self._steps = steps
        self._reads = reads
        self._strip_prefix = strip_prefix
        self._add_prefix = add_prefix
        self._unreadable = unreadable
        self.archives: list[Archive | Folder] = []
        for step in steps:
            self.archives += [step] if isinstance(step, Folder) else step.archives

        self.whole = frozenset(
            number
            for number, archive in enumerate(self.archives)
            if isinstance(archive, Archive) and archive.is_whole
        )
        """Numbers of the archives whose directory has no member that cannot be read."""

    @property
    def has_folders(self) -> bool:
        return any(isinstance(step, Folder) for step in self._steps)

    def places(self, names: Sequence[str]) -> list[Place | DataError | StorageError]:
        """Of each name; MissingImage where no archive has it, RecordError where it is refused."""
        wanted = searched_names(names, self._strip_prefix, self._add_prefix)
        found: list[Place | DataError | StorageError | None] = [
            name if isinstance(name, RecordError) else None for name in wanted
        ]
        base = 0
        for step in self._steps:
            left = [number for number, place in enumerate(found) if place is None]
            if not left:
                break
            some = [str(wanted[number]) for number in left]
            for number, place in zip(left, self._in_step(step, base, some), strict=True):
                found[number] = place
            base += 1 if isinstance(step, Folder) else len(step.archives)
        return [
            place or self._named_archive(str(name)) or self._nowhere(given)
            for place, name, given in zip(found, wanted, names, strict=True)
        ]

    def sizes(self, places: Sequence[Place]) -> list[Size | DataError | StorageError]:
        """Upright width and height of each, by its header where it is not known yet."""
        sizes: list[Size | DataError | StorageError | None] = [None] * len(places)
        by_archive: dict[int, list[int]] = {}
        for number, place in enumerate(places):
            by_archive.setdefault(place.archive, []).append(number)
        for archive_number, numbers in by_archive.items():
            probed = self._sizes(archive_number, [places[number] for number in numbers])
            for number, size in zip(numbers, probed, strict=True):
                sizes[number] = size
        return [size for size in sizes if size is not None]

    def problem(self, place: Place) -> DataError | None:
        """Why the member at a place cannot be read, as far as its archive's directory says."""
        archive = self.archives[place.archive]
        return archive.problem(place.member) if isinstance(archive, Archive) else None

    def _sizes(self, number: int, places: list[Place]) -> list[Size | DataError | StorageError]:
        archive = self.archives[number]
        if isinstance(archive, Folder):
            folder = archive
            return self._reads.each(
                folder.url,
                lambda access, place: folder.probe(access, place.name, _stat(place)),
                places,
            )
        members = [place.member for place in places]
        known = archive.known_sizes(members)
        unknown = [member for member, size in zip(members, known, strict=True) if size is None]
        asked = list(zip(unknown, archive.places(unknown), strict=True))
        probed = iter(
            self._reads.each(
                archive.file.url, lambda access, item: archive.probe(access, *item), asked
            )
        )
        return [next(probed) if size is None else size for size in known]

    def _in_step(
        self, step: Group | Folder, base: int, names: list[str]
    ) -> list[Place | StorageError | None]:
        if isinstance(step, Folder):
            stats = self._reads.each(step.url, step.stat, names)
            return [
                Place(base, -1, name, stat) if isinstance(stat, ObjectStat) else stat
                for name, stat in zip(names, stats, strict=True)
            ]
        archives, members = step.lookup.find(names)
        found = zip((archives + base).tolist(), members.tolist(), names, strict=True)
        return [
            Place(archive, member, name, None) if member >= 0 else None
            for archive, member, name in found
        ]

    def _named_archive(self, name: str) -> Place | DataError | None:
        """The place of a name that says its archive; None for any other name."""
        split = in_archive(name)
        if split is None:
            return None
        archive_name, member_name = split
        searched = False
        base = 0
        for step in self._steps:
            archives = [] if isinstance(step, Folder) else step.archives
            for number, archive in enumerate(archives):
                if not is_archive(archive.file.url, archive_name):
                    continue
                searched = True
                member = step.lookup.find_in(member_name, number)  # type: ignore[union-attr]
                if member >= 0:
                    return Place(base + number, member, member_name, None)
            base += 1 if isinstance(step, Folder) else len(archives)
        if searched:
            return MissingImage(f"no such image in {archive_name}: {shown(member_name)}")
        return None

    def _nowhere(self, name: str) -> MissingImage:
        places = len({id(archive) for archive in self.archives}) + len(self._unreadable)
        because = "".join(f"; {reason}" for reason in self._unreadable)
        if not places:
            because = (
                "; no archive lies beside the record file, and `images` of the source is empty"
            )
        return MissingImage(f"no such image: {shown(name)}, places searched: {places}{because}")


def _stat(place: Place) -> ObjectStat:
    assert place.stat is not None
    return place.stat
