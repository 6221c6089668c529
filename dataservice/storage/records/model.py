"""What a record is once it is read: turns of text with the places of images in them.

Invariants: k images in a turn stand between its k + 1 pieces, in the order of `Record.images`;
pieces are the source's own text, without any placeholder; every turn belongs to one document.
msgspec's structs are made six times as fast as frozen dataclasses, and there are three a record.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool", "text"]

LAYOUTS = ("llava", "messages", "text", "obelics", "mmc4", "finevision", "caption")
"""Names of the record layouts; the position is the code in the index."""

MAX_IMAGES = 65_535
"""Images a record may have."""

Size = tuple[int, int]
"""Width and height in pixels."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    role: Role
    pieces: tuple[str, ...]
    """An image stands between two neighbours; a piece may be empty."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    layout: str
    """One of `LAYOUTS`."""
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    """Names or data: URIs as written, in the order in which they stand in the text."""
    starts: tuple[int, ...] = (0,)
    """Numbers of the turns where a document begins: several when the record is a list of records,
    which stay together."""
    sizes: tuple[Size | None, ...] = ()
    """By image, as the record says; None where it says nothing that can be."""
    keyed: bool = False
    """Its images are called by the records' keys and ".jpg"; another suffix may be theirs."""
