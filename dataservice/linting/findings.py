"""What `lint` says of one thing: a picture, a member or archive, a record.

Invariants: `as_object` has the same keys for all findings of a kind; text in it is valid Unicode,
whatever the names on disk are, and URLs in it show no credentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dataservice.masking import mask_urls

Kind = Literal["image", "zip", "tar", "jsonl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    file: str
    """As it was named on the command line, or the path found there."""
    kind: Kind
    """"jsonl" for record files of every kind, "tar" for tar archives as "zip" for zips."""
    reason: str | None
    """Why it cannot be used, for a person; None when it can."""
    line: int | None = None
    """Of a record, from 1; in a JSON array and in a Parquet file its number."""
    member: str | None = None
    """None for the archive itself."""
    size: int | None = None
    """In bytes: of the archive as it is stored, of a member unpacked."""
    width: int | None = None
    """In pixels, upright."""
    height: int | None = None
    mean_rgb: tuple[float, float, float] | None = None
    """Of the 8-bit pixels, upright, over white."""
    sha256: str | None = None
    """Of a member's unpacked bytes."""

    def as_object(self, *, digest: bool) -> dict[str, Any]:
        """For JSON; with `digest` also mean_rgb and sha256."""
        told: dict[str, Any] = {"file": _plain(self.file), "kind": self.kind}
        if self.kind == "jsonl":
            told["line"] = self.line
        elif self.kind != "image":
            told["member"] = None if self.member is None else _plain(self.member)
        told["outcome"] = "ok" if self.reason is None else "rejected"
        told["reason"] = None if self.reason is None else _plain(self.reason)
        if self.kind == "image":
            told |= {"width": self.width, "height": self.height}
            extra: tuple[str, Any] = ("mean_rgb", self.mean_rgb)
        elif self.kind == "jsonl":
            return told
        else:
            told["size"] = self.size
            extra = ("sha256", self.sha256)
        return told | dict([extra]) if digest else told

    @property
    def place(self) -> str:
        """For a person: the file, and what in it."""
        if self.line is not None:
            return f"{_plain(self.file)}:{self.line}"
        return _plain(self.file) + (f": {_plain(self.member)}" if self.member is not None else "")


def _plain(text: str) -> str:
    return mask_urls(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
