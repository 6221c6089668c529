"""Images that are plain files below one folder.

Invariants: nothing is listed, a name is looked for when a record has it.
"""

from __future__ import annotations

import posixpath

from dataservice.errors import DataError
from dataservice.storage.archives.access import Access
from dataservice.storage.backends import ObjectStat
from dataservice.storage.members import probe_place
from dataservice.storage.membertable import AS_IT_IS
from dataservice.storage.zips import Place


class Folder:
    def __init__(self, url: str) -> None:
        self.url = url

    def stat(self, access: Access, name: str) -> ObjectStat | None:
        """None when there is no such file. Raises StorageError."""
        try:
            stat = access.stat(posixpath.join(self.url, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.is_folder else stat

    def probe(self, access: Access, name: str, stat: ObjectStat) -> tuple[int, int] | DataError:
        """The picture's upright width and height, by its header. Raises StorageError."""
        url = posixpath.join(self.url, name)
        size = stat.size_bytes
        try:
            header = probe_place(
                lambda offset, some: access.read(url, offset, some),
                Place(AS_IT_IS, 0, size, size, 0),
                size,
            )
        except DataError as error:
            return error
        return header.width, header.height
