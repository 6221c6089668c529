"""The content of one record file, read once from front to end.

Invariants: blocks of at most 256 KiB; `crc32` and `size_bytes` hold after the last of them; what is
wrong with the file's own bytes ends the blocks and is told by `end`, what is wrong with the store
is raised; of a file that is none of records there are no blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from isal import isal_zlib

from dataservice.errors import RecordError
from dataservice.storage.backends import local_path
from dataservice.storage.objects import ObjectStore, read_chunks
from dataservice.storage.packed.unpacking import packing_of, unpacked
from dataservice.storage.packed.zip_stream import LeftOut
from dataservice.storage.recordfiles.finders import Finder, Found, Problem
from dataservice.storage.recordfiles.foreign import HEAD_BYTES, why_no_records

_BLOCK_BYTES = 256 * 1024
_READ_BYTES, _REMOTE_READ_BYTES = 1024 * 1024, 8 * 1024 * 1024


class _Foreign(RecordError):
    """The file is none of records."""


class Content:
    def __init__(self, store: ObjectStore, url: str, size_bytes: int, *, deadline_s: float) -> None:
        self._store = store
        self._url = url
        self._stored_bytes = size_bytes
        self._deadline_s = deadline_s
        self.crc32 = 0
        """Of the file's stored bytes."""
        self.size_bytes = 0
        """Of the content."""
        self.unread = ""
        """Why the file was not read to its end, or not all of it, after `end`."""
        self._damage = ""
        """Why there are no more blocks."""
        self._lost = ""
        """That of the file something is lost by the damage, where anything could be used."""
        self._left_out = ""
        """What else is in the file, though it was read to its end."""

    def blocks(self) -> Iterator[bytes]:
        """Raises StorageError and FileNotFoundError."""
        stored = self._stored()
        try:
            for block in self._checked(_cut(unpacked(packing_of(self._url), stored))):
                self.size_bytes += len(block)
                yield block
        except _Foreign as error:
            self._damage = error.reason
        except LeftOut as error:
            self._left_out = error.reason
        except RecordError as error:
            self._damage = error.reason
            self._lost = (
                "; everything from byte {} of the unpacked content on, record {} and all behind "
                "it, is lost and could not be counted"
            )
        for _ in stored:  # the checksum is of the whole file
            pass

    def end(self, finder: Finder) -> tuple[Found, Problem | None]:
        """After the last block: what the end of the content adds to what the finder found."""
        found, problem = finder.end(self._damage)
        if problem:
            lost = self._lost.format(problem.offset, problem.number)
            left_out = self._left_out and f"; {self._left_out}"
            problem = replace(problem, reason=f"{problem.reason}{lost}{left_out}")
        elif self._left_out:
            problem = Problem(finder.next_number, self.size_bytes, self._left_out)
        self.unread = problem.reason if problem else ""
        return found, problem

    def _checked(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Raises _Foreign before the first block, else what they raise."""
        head: list[bytes] = []
        damage: RecordError | None = None
        try:
            while sum(map(len, head)) < HEAD_BYTES and (block := next(blocks, None)) is not None:
                head.append(block)
        except RecordError as error:
            damage = error
        if reason := why_no_records(self._url, b"".join(head)[:HEAD_BYTES]):
            raise _Foreign(reason)
        yield from head
        if damage:
            raise damage
        yield from blocks

    def _stored(self) -> Iterator[bytes]:
        chunks = read_chunks(
            self._store,
            self._url,
            size_bytes=self._stored_bytes,
            chunk_bytes=_READ_BYTES if local_path(self._url) else _REMOTE_READ_BYTES,
            deadline_s=self._deadline_s,
        )
        for chunk in chunks:
            self.crc32 = isal_zlib.crc32(chunk, self.crc32)
            yield chunk


def _cut(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if len(chunk) <= _BLOCK_BYTES:
            yield chunk
        else:
            for at in range(0, len(chunk), _BLOCK_BYTES):
                yield chunk[at : at + _BLOCK_BYTES]
