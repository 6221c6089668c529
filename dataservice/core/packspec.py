"""The resolved description of one pack: all that a worker needs to build its bytes, no index.

Invariants: plain integers and strings only; two workers given equal specs build equal bytes.
A spec is about a kilobyte; shards are named once in `PackSpec.shards` and referred to by number.
"""

from __future__ import annotations

from dataclasses import dataclass

PackId = str  # "<lane>.<window>.<number in window>", or "pad.<tokens>" for an empty pack

PADDING = "pad."
TOKEN_BYTES = 8
"""Of a token on the wire: input_ids and labels, int32 each."""


def padding_id(pack_length: int) -> PackId:
    return f"{PADDING}{pack_length}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRef:
    """One file, as it was when indexed."""

    source: str
    name: str
    """Name within the source, unique there (path below the source's common root)."""
    url: str
    """Where the origin is: a local path or an fsspec URL."""
    size_bytes: int
    mtime_ns: int
    """0 where the store has no mtime."""
    packing: str = ""
    """"": read as it is; "gz", "zst" or "zip" (the one file in it): compressed as a whole, places
    count in the unpacked content; "parquet": places are row numbers."""
    unpacked_bytes: int = 0
    """Size of the unpacked content; 0 for the other packings."""

    @property
    def content_bytes(self) -> int:
        """Size of what places count in, which is also that of a staged copy."""
        return self.unpacked_bytes if self.packing in ("gz", "zst", "zip") else self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    shard: int
    """Number of the archive in `PackSpec.shards`; a file of an image folder is its own shard."""
    member: str
    offset: int
    """Of the member's local header in a zip, of its data in a tar; 0 for a plain file. Of an image
    in a record that record's offset, as `ItemSpec.offset`."""
    stored_bytes: int
    size_bytes: int
    method: int
    """Zip compression method, such as 0 stored and 8 deflate. -1: the `stored_bytes` at `offset` as
    they are (a plain file, a tar's member); -2: image number `member` of the record at `offset` of
    a record file; -3: column and number `member` of row `offset` of a Parquet file."""
    crc32: int
    """-1 where unknown (a plain file, a tar's member)."""
    width: int
    """Upright, before the resize, as the header says."""
    height: int
    target_width: int
    """After the resize; of tiles, of all but the thumbnail."""
    target_height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemSpec:
    """A sample; or, of one that is longer than a pack, a piece (text only) or the beginning."""

    key: str
    """Sample key: "<source>/<shard name>@<offset>"."""
    source: str
    layout: str
    """Record layout found by the index, such as "llava"."""
    shard: int
    """Number of the record file in `PackSpec.shards`."""
    offset: int
    """In bytes; in a Parquet file the row."""
    length: int
    """Of the record in bytes, without its line end."""
    crc32: int
    """Of those bytes."""
    start: int
    """First token of the piece; 0 for any sample with images."""
    stop: int
    """One past the last token, not inside an image; the sample's length for a whole sample."""
    total_tokens: int
    """Length of the whole sample in tokens, image tokens included; checked when built."""
    images: tuple[ImageSpec, ...]
    """Of the whole sample."""
    kept_images: int
    """The first of them that stand before `stop`; the others are cut off and never read."""

    @property
    def kept(self) -> tuple[ImageSpec, ...]:
        return self.images[: self.kept_images]

    @property
    def piece_key(self) -> str:
        """The sample key, with "[start:stop]" behind it when the item is a piece of the sample."""
        if (self.start, self.stop) == (0, self.total_tokens):
            return self.key
        return f"{self.key}[{self.start}:{self.stop}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSpec:
    pack_id: PackId
    pack_length: int
    shards: tuple[ShardRef, ...]
    items: tuple[ItemSpec, ...]
    """In the order in which they stand in the pack. Empty for a padding pack."""
    num_tokens: int
    """Of the items; documents that are aligned take more places."""
    num_patches: int
    """Of kept images; of tiles those within them, the thumbnails' with them."""
    align: int = 1
    """Documents begin at its multiples, and so does the padding behind the last one."""
