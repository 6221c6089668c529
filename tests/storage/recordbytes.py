"""Record files for tests: packings, a store in memory, and a slow scanner to compare with."""

from __future__ import annotations

import gzip
import io
import zipfile
from dataclasses import dataclass, field

import zstandard

from dataservice.storage.backends import ObjectStat

BOM = b"\xef\xbb\xbf"
PACKINGS = ("", "gz", "zst", "zip")


def pack(packing: str, content: bytes, *, name: str = "data.jsonl", parts: int = 1) -> bytes:
    """`parts`: gzip members or zstandard frames."""
    step = max(-(-len(content) // parts), 1)
    cut = [content[at : at + step] for at in range(0, len(content), step)] or [b""]
    if packing == "gz":
        return b"".join(gzip.compress(part, mtime=0) for part in cut)
    if packing == "zst":
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        return b"".join(compressor.compress(part) for part in cut)
    if packing == "zip":
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
        return file.getvalue()
    return content


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@dataclass
class MemoryStore:
    files: dict[str, bytes] = field(default_factory=dict)
    bytes_read: int = 0

    def stat(self, url: str, *, deadline_s: float) -> ObjectStat:
        return ObjectStat(size_bytes=len(self.files[url]), mtime_ns=0)

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        data = self.files[url][offset : offset + size]
        self.bytes_read += len(data)
        return data

    def glob(self, pattern: str, *, deadline_s: float) -> dict[str, ObjectStat | None]:
        return dict.fromkeys(sorted(self.files))

    def list_folder(self, folder: str, prefix: str, *, deadline_s: float) -> None: ...


Row = tuple[int, int, int]
"""(number, offset, length)"""


def slow_lines(data: bytes) -> list[Row]:
    rows = []
    offset = 0
    for number, raw in enumerate(data.split(b"\n"), start=1):
        start = len(BOM) if offset == 0 and raw.startswith(BOM) else 0
        text = raw[start:].removesuffix(b"\r")
        if text.strip():
            rows.append((number, offset + start, len(text)))
        offset += len(raw) + 1
    return rows


def slow_values(data: bytes, *, in_array: bool) -> tuple[list[Row], int]:
    """Byte by byte: the records, and where a problem stands (-1: none)."""
    spans: list[tuple[int, int]] = []
    depth = start = 0
    other: list[int] = []
    inside = escaped = False
    for at in range(len(data)):
        byte = data[at : at + 1]
        was_escaped, escaped = escaped, False
        plain = True
        if not was_escaped:
            if byte == b"\\":
                escaped = True
            elif byte == b'"':
                inside = not inside
            elif not inside and byte in b"[{":
                if depth == 0:
                    spans += [(other[0], other[-1] + 1)] if other else []
                    other, start = [], at
                depth += 1
                plain = False
            elif not inside and byte in b"]}" and depth:
                depth -= 1
                plain = False
                if depth == 0:
                    spans.append((start, at + 1))
            elif not inside and byte == b"]" and in_array:
                spans += [(other[0], other[-1] + 1)] if other else []
                rest = data[at + 1 :].lstrip(b" \t\r\n,")
                return _rows(spans), len(data) - len(rest) if rest else -1
        if plain and depth == 0 and byte not in b" \t\r\n,":
            other.append(at)
    problem = -1
    if depth:
        spans.append((start, len(data)))
    else:
        spans += [(other[0], other[-1] + 1)] if other else []
        problem = len(data) if in_array else -1
    return _rows(spans), problem


def _rows(spans: list[tuple[int, int]]) -> list[Row]:
    return [(number, a, b - a) for number, (a, b) in enumerate(spans, start=1)]
