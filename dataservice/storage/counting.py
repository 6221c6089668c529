"""What the index asks of whatever counts tokens; pipeline.text has the real one.

Invariants: counts follow from the record and the fingerprint alone; they do not depend on the
sizes of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dataservice.errors import RecordError
from dataservice.storage.records import Record


class Counted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of a record."""

    text_tokens: int
    """All but image tokens."""
    loss_tokens: int
    image_positions: tuple[int, ...]
    """By image: the text tokens before it. Markup of earlier images is text, its own comes after:
    with the image tokens of earlier images added, this is where the image begins."""
    image_markup: int
    """Text tokens that belong to each image, such as its start and end."""
    num_docs: int = 1
    """Documents that the record is."""


class RecordCounter(Protocol):
    """`fingerprint` changes when its counts may."""

    @property
    def fingerprint(self) -> str: ...

    def count_all(self, records: Sequence[Record]) -> list[Counted | RecordError]:
        """By record; a RecordError for one that cannot be used."""
