"""A record file looked at as a whole: its records counted, nothing decoded.

Invariants: every record counts once, as the index would have it; memory holds eight bytes a record
and as many kinds of reasons as are shown.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dataservice.core.cost import measure
from dataservice.core.settings import PlanSettings
from dataservice.linting.inspecting import Inspector, RecordFile, columns_of
from dataservice.storage.recordfiles import packing_of
from dataservice.storage.records import LAYOUTS

KINDS_KEPT = 50


@dataclass(slots=True)
class Kind:
    """Reasons that differ only in names and numbers."""

    reason: str
    """Of the first of them."""
    line: int
    count: int = 0


@dataclass(slots=True)
class FileSummary:
    source: str
    file: str
    size_bytes: int
    packing: str
    """"" for none."""
    records: int = 0
    layouts: dict[str, int] = field(default_factory=dict)
    """Good records by layout."""
    rejected: int = 0
    kinds: dict[str, Kind] = field(default_factory=dict)
    text_tokens: int = 0
    loss_tokens: int = 0
    image_tokens: int = 0
    num_images: int = 0
    images_in: dict[str, int] = field(default_factory=dict)
    """By the file that they are in, or the folder of it."""
    longest: tuple[int, int] = (0, 0)
    """Tokens and line."""
    over_pack: int = 0
    """Good records longer than plan.pack_length."""
    _lengths: array[int] = field(default_factory=lambda: array("q"))

    def percentile(self, percent: float) -> int:
        """Tokens of a good record."""
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        return int(np.percentile(lengths, percent)) if len(lengths) else 0

    def reject(self, reason: str, line: int) -> None:
        self.rejected += 1
        pattern = re.sub(r"'[^']*'|\d+", "*", reason)
        if pattern not in self.kinds and len(self.kinds) >= KINDS_KEPT:
            pattern = reason = "other reasons"
        self.kinds.setdefault(pattern, Kind(reason, line)).count += 1

    def keep_lengths(self, lengths: list[int], lines: list[int], pack_length: int) -> None:
        self._lengths.extend(lengths)
        self.over_pack += sum(length > pack_length for length in lengths)
        self.longest = max([self.longest, *zip(lengths, lines, strict=True)])


def summary_of(
    inspector: Inspector,
    where: RecordFile,
    plan: PlanSettings,
    reached: Callable[[int], None] = lambda _: None,
) -> FileSummary:
    """Of a whole file; `reached` is told how many bytes of its content lie behind."""
    found = FileSummary(
        source=where.source.name,
        file=where.file.url,
        size_bytes=where.file.stat.size_bytes,
        packing=packing_of(where.file.url),
    )
    for lines in inspector.batches(where):
        rows, located = inspector.rows(where, lines)
        bad = {rejected.row: rejected for rejected in rows.rejected}
        for rejected in rows.rejected:
            found.reject(rejected.reason, rejected.line)
        found.records += rows.num_rows
        columns = columns_of(rows)
        measures = measure(columns, rules=plan.vision)
        good = [row for row in range(rows.num_rows) if row not in bad]
        for code in rows.samples["layout"][good].tolist():
            found.layouts[LAYOUTS[code]] = found.layouts.get(LAYOUTS[code], 0) + 1
        found.text_tokens += int(columns.text_tokens.sum())
        found.loss_tokens += int(columns.loss_tokens.sum())
        found.image_tokens += int(measures.image_tokens.sum())
        found.num_images += int(measures.num_images.sum())
        found.keep_lengths(
            measures.length[good].tolist(), [lines[row].number for row in good], plan.pack_length
        )
        for images in located:
            for image in images:
                place = image.identity.url
                if image.identity.key == "":
                    place = place.removesuffix(image.identity.name) or place
                found.images_in[place] = found.images_in.get(place, 0) + 1
        reached(lines[-1].offset + lines[-1].length)
    return found
