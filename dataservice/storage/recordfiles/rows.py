"""The rows of a Parquet file as records, read once from the first to the last.

Invariants: offset and length of a record are its row and the size of its JSON; `crc32` is that of
the file's footer, so that images are not read to tell the file apart. A row that cannot be a
record is one of length 0 with the reason; where the file cannot be read on, it is the last one.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataservice.errors import RecordError, StorageError
from dataservice.storage.jsonl import Line
from dataservice.storage.objects import ObjectStore
from dataservice.storage.parquet import ParquetTable
from dataservice.storage.recordfiles.foreign import why_no_records
from dataservice.storage.signatures import HEAD_BYTES, container_format, described


class RowScan:
    def __init__(
        self, store: ObjectStore, url: str, size_bytes: int, *, deadline_s: float, limit: int
    ) -> None:
        self._store = store
        self._url = url
        self._deadline_s = deadline_s
        self._limit = limit
        self.crc32 = 0
        """Of the footer."""
        self.size_bytes = size_bytes
        self.unread = ""
        """Why the file was not read to its end, after that."""

    def lines(self) -> Iterator[Line]:
        row = 0
        lost = ""
        try:
            table = self._table()
            lost = "; this row of the file and all behind it are lost and could not be counted"
            self.crc32 = table.footer_crc32
            for record in table.records():
                yield self._line(row, record)
                row += 1
        except RecordError as error:
            self.unread = error.reason + lost
            yield Line(row + 1, row, 0, None, self.unread)

    def _table(self) -> ParquetTable:
        try:
            return ParquetTable(self._read, self.size_bytes)
        except RecordError:
            head = self._read(0, min(HEAD_BYTES, self.size_bytes))
            if described(head) is None or container_format(head) == "parquet":
                raise
            raise RecordError(why_no_records(self._url, head)) from None

    def _line(self, row: int, data: bytes | RecordError) -> Line:
        if isinstance(data, RecordError):
            return Line(row + 1, row, 0, None, data.reason)
        if len(data) <= self._limit:
            return Line(row + 1, row, len(data), data)
        reason = f"the record has {len(data)} bytes, more than the limit of {self._limit}"
        return Line(row + 1, row, len(data), None, reason)

    def _read(self, offset: int, size: int) -> bytes:
        data = self._store.read(self._url, offset, size, deadline_s=self._deadline_s)
        if len(data) != size:
            raise StorageError(
                f"{self._url} ends at {offset + len(data)}, expected {self.size_bytes} bytes"
            )
        return data
