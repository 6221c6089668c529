"""The places where records find their images, as `lint` opens them.

Invariants: a place that cannot be opened, be it damaged or out of reach, is asked once, searched no
further and says why; the records that find their images elsewhere are linted all the same.
"""

from __future__ import annotations

from dataservice.errors import ArchiveError, StorageError
from dataservice.storage.archives import Archives
from dataservice.storage.archives.opened import Step
from dataservice.storage.listing import FoundFile


class Places(Archives):
    """Archives and folders; close it when done."""

    def beside(self, file: FoundFile) -> Step:
        try:
            return super().beside(file)
        except (StorageError, FileNotFoundError) as error:
            return ArchiveError(f"{file.url}: could not be read: {error}")
