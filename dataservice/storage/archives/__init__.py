"""The archives and folders that records name their images in, and how images are found there.

Invariants: a zip's or tar's directory is read once however many record files refer to it, and a
picture's header once a build.
"""

from __future__ import annotations

from dataservice.storage.archives.archive import ARCHIVE_PREFIX, Archive, archive_key
from dataservice.storage.archives.finder import ImageFinder, MissingImage, Place
from dataservice.storage.archives.folder import Folder
from dataservice.storage.archives.opened import Archives

__all__ = [
    "ARCHIVE_PREFIX",
    "Archive",
    "Archives",
    "Folder",
    "ImageFinder",
    "MissingImage",
    "Place",
    "archive_key",
]
