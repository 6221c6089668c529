"""A record laid out: its tokens and images, with its texts numbered among those of a batch.

Invariants: text between two tokens or images is one segment; what is laid out does not depend on
the rest of the batch but for the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from dataservice.pipeline.markup import IMAGE, Ids, Part
from dataservice.pipeline.tokenizing import Run, Segment
from dataservice.storage.records import Record, Turn

Piece = int | tuple[Ids, bool] | None
"""The number of a segment of the batch; tokens and whether they carry loss; None for an image."""
Layout = list[list[Piece]]
"""By document."""


def documents(record: Record) -> list[Sequence[Turn]]:
    """The turns of each."""
    if record.starts == (0,):
        return [record.turns]
    bounds = [*record.starts, len(record.turns)]
    return [record.turns[a:b] for a, b in pairwise(bounds)]


def is_plain(turns: Sequence[Turn]) -> bool:
    for turn in turns:
        if turn.role != "text":
            return False
    return True


def pieces_of(parts: Sequence[Part], segments: list[Segment], base: int) -> list[Piece]:
    """Adds the segments, which are numbered from `base` on."""
    pieces: list[Piece] = []
    runs: list[Run] = []
    for what, loss in [*parts, (IMAGE, False)]:
        if isinstance(what, str):
            if runs and runs[-1][1] == loss:
                runs[-1] = (runs[-1][0] + what, loss)
            else:
                runs.append((what, loss))
            continue
        if runs:
            pieces.append(base + len(segments))
            segments.append(tuple(runs))
            runs = []
        last = pieces[-1] if pieces else None
        if what and isinstance(last, tuple) and last[1] == loss:
            pieces[-1] = (last[0] + what, loss)
        else:
            pieces.append((what, loss) if what else None)
    return pieces[:-1]


def runs_of(
    piece: int | tuple[Ids, bool], segments: Sequence[Segment], lengths: Sequence[tuple[int, ...]]
) -> Iterable[tuple[int, bool]]:
    """Lengths in tokens, and whether they carry loss."""
    if isinstance(piece, int):
        return zip(lengths[piece], [loss for _, loss in segments[piece]], strict=True)
    return ((len(piece[0]), piece[1]),)
