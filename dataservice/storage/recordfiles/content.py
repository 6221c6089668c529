"""The content of one record file, read once from front to end.

Invariants: blocks of at most 256 KiB; `crc32` and `size_bytes` hold after the last of them; what is
wrong with the file's own bytes ends the blocks and is told in `damage`, what is wrong with the
store is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isal import isal_zlib

from dataservice.errors import RecordError
from dataservice.storage.backends import local_path
from dataservice.storage.objects import ObjectStore, read_chunks
from dataservice.storage.packed.unpacking import packing_of, unpacked

_BLOCK_BYTES = 256 * 1024
_READ_BYTES, _REMOTE_READ_BYTES = 1024 * 1024, 8 * 1024 * 1024


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
        self.damage = ""

    def blocks(self) -> Iterator[bytes]:
        """Raises StorageError and FileNotFoundError."""
        stored = self._stored()
        try:
            for block in _cut(unpacked(packing_of(self._url), stored)):
                self.size_bytes += len(block)
                yield block
        except RecordError as error:
            self.damage = error.reason
        for _ in stored:  # the checksum is of the whole file
            pass

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
