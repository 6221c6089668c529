"""What a source is made of on disk: its record files, its images' places, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mismatch = Literal["reject", "front"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFormat:
    """How the records of a source are written."""

    layout: str = "auto"
    """"auto" (told apart by content) or one of `records.LAYOUTS`."""
    placeholders: tuple[str, ...] = ("<image>",)
    """Texts that stand where an image goes; "{n}" in one stands for the image's number from 1."""
    mismatch: Mismatch = "reject"
    """Of placeholders and images that do not agree: "reject", or "front", which puts the one image
    of a record without placeholders in front and rejects the rest."""
    fields: tuple[tuple[str, str], ...] = ()
    """(name in the layout, name in these records), for fields that have another name here."""
    roles: tuple[tuple[str, str], ...] = ()
    """(role in these records, system, user, assistant or tool), besides those that are known."""
    data_uris: bool = False
    """Whether an image may stand in the record itself, as a data: URI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFiles:
    """As configured; globs are not expanded yet. Paths are local or fsspec URLs."""

    name: str
    records: tuple[str, ...]
    """Globs of record files: .jsonl, .json, both also as .gz, .zst or .zip, and .parquet."""
    images: tuple[str, ...] = ()
    """Globs of zips and tars, or folders; a record's image is looked up in the archive of the same
    stem as its record file first, then in these, in order."""
    format: RecordFormat = field(default_factory=RecordFormat)
    strip_prefix: str = ""
    """Taken from the front of an image's name where it stands there, before it is looked up."""
    add_prefix: str = ""
    """Put in front of an image's name then."""
    take: str = "all"
    """Which of the source's records, in the order of the listing: "all", "first:N", "end:N" or
    "random:N", N a number or a share such as "10%"."""
