"""An archive of images looked at as a whole, by its directory; no member is read.

Invariants: every member counts once; bad ones are named, so many as are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dataservice.errors import ArchiveError
from dataservice.linting.inspecting import Inspector
from dataservice.storage.listing import FoundFile

BAD_SHOWN = 20


@dataclass(slots=True)
class ArchiveSummary:
    file: str
    kind: str
    """"zip" or "tar"."""
    size_bytes: int
    reason: str | None = None
    """Why it cannot be read at all."""
    members: int = 0
    unpacked_bytes: int = 0
    methods: dict[int, int] = field(default_factory=dict)
    """Members by zip compression method; -1 as they are."""
    num_bad: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of the first of them."""


def archive_summary(inspector: Inspector, file: FoundFile) -> ArchiveSummary:
    """Raises StorageError."""
    found = ArchiveSummary(
        file=file.url,
        kind="tar" if file.url.lower().endswith(".tar") else "zip",
        size_bytes=file.stat.size_bytes,
    )
    archive = inspector.archive(file)
    if isinstance(archive, ArchiveError):
        found.reason = archive.reason
        return found
    found.members = archive.num_members
    size, method = (
        archive.columns[name].slice(0, archive.num_members) for name in ("size_bytes", "method")
    )
    found.unpacked_bytes = int(size.sum())
    codes, counts = np.unique(method, return_counts=True)
    found.methods = dict(zip(codes.tolist(), counts.tolist(), strict=True))
    rows = np.flatnonzero(archive.problems())
    found.num_bad = len(rows)
    for row in rows[:BAD_SHOWN].tolist():
        problem = archive.problem(row)
        found.bad.append((archive.name(row), problem.reason if problem else ""))
    return found
