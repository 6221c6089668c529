"""Files that say which archive has a name, for every process that reads records to map.

Invariants: a file appears complete or not at all; what is there is not made again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from dataservice.storage.archives.archive import Archive
from dataservice.storage.archives.lookup import write_lookup
from dataservice.storage.archives.opened import Archives, lookup_name
from dataservice.storage.listing import FoundFile
from dataservice.storage.tables import TEMPORARY_PREFIX


def keep_lookups(folder: str, archives: Archives, roots: Sequence[FoundFile]) -> list[str]:
    """Of image roots; the names of the files. Raises StorageError."""
    return [keep_lookup(folder, group) for group in archives.groups(roots)]


def keep_lookup(folder: str, group: Sequence[Archive]) -> str:
    """Of archives that are searched together; the name of the file."""
    name = lookup_name(group)
    path = os.path.join(folder, name)
    if os.path.exists(path):
        return name
    owner = f"{os.getpid()}-{threading.get_ident()}"
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{owner}-lookup")
    write_lookup(temporary, group)
    os.replace(temporary, path)
    return name
