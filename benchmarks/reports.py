"""What a part of a benchmark hands back: lines to print, and figures with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from figures import Figure


@dataclass(kw_only=True)
class Report:
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
