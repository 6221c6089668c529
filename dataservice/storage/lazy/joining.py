"""Rows of several calls of a RowReader as those of one call.

Invariants: as if all records had been read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dataservice.storage.index_rows import (
    IMAGE_COLUMNS,
    SAMPLE_COLUMNS,
    FolderFile,
    Rejected,
    Rows,
)


def joined(parts: Sequence[Rows], num_archives: int) -> Rows:
    """`num_archives` are those of the finder."""
    if len(parts) == 1:
        return parts[0]
    inside: dict[str, int] = {}
    files: dict[FolderFile, int] = {}
    rejected: list[Rejected] = []
    images = []
    num_rows = 0
    for part in parts:
        numbers = [inside.setdefault(column, len(inside)) for column in part.inside]
        archive, member = part.images["archive"], part.images["member"]
        places = np.array([*range(num_archives), *(num_archives + n for n in numbers)])
        in_folder = np.isin(archive, [file.archive for file in part.files])
        renumbered = np.array([files.setdefault(file, len(files)) for file in part.files] or [0])
        member = np.where(in_folder, renumbered[member * in_folder], member)
        images.append({**part.images, "archive": places[archive], "member": member})
        rejected += [replace(one, row=one.row + num_rows) for one in part.rejected]
        num_rows += part.num_rows
    return Rows(
        samples={name: np.concatenate([p.samples[name] for p in parts]) for name in SAMPLE_COLUMNS},
        images={name: np.concatenate([part[name] for part in images]) for name in IMAGE_COLUMNS},
        files=tuple(files),
        inside=tuple(inside),
        rejected=tuple(rejected),
        again=any(part.again for part in parts),
    )
