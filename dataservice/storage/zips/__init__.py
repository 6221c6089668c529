"""Zip archives by positioned reads: the central directory once, then one read a member.

Invariants: nothing is written and no member is believed: sizes are bounded before anything is
unpacked, unpacking stops one byte past the planned size, and what comes out has the CRC that the
central directory says. A bad member is refused alone (`problem`), a bad archive as a whole
(ArchiveError). Of two members of one name the last counts.
"""

from __future__ import annotations

from dataservice.storage.zips.directory import read_directory
from dataservice.storage.zips.methods import METHODS, STORED
from dataservice.storage.zips.reading import Place, read_place, read_stored

__all__ = [
    "METHODS",
    "STORED",
    "Place",
    "read_directory",
    "read_place",
    "read_stored",
]
