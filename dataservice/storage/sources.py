"""What a source is made of on disk: JSONL files and the archives or folders of its images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFiles:
    """As configured; globs are not expanded yet. Paths are local or fsspec URLs."""

    name: str
    jsonl: tuple[str, ...]
    """Globs of JSONL files."""
    images: tuple[str, ...] = ()
    """Globs of zips, or folders; a record's image is looked up in the zip of the same stem as its
    JSONL first, then in these, in order."""
    layout: str = "auto"
    """"auto" (told apart by content), "llava", "messages" or "text"."""
    placeholder: str = "<image>"
