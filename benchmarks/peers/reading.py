"""Samples read from the JSONL files and zips as they are, for loaders that leave it to the user."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator, Sequence

from peers.work import Entry, Sample


class Reader:
    """Thread-safe: every thread has files of its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def read(self, entry: Entry) -> Sample:
        if not hasattr(self._own, "records"):
            self._own.records, self._own.archives = {}, {}
        records, archives = self._own.records, self._own.archives
        if entry.records not in records:
            records[entry.records] = open(entry.records, "rb")
        file = records[entry.records]
        file.seek(entry.offset)
        record = file.read(entry.length)
        if not entry.members:
            return Sample(record, [])
        if entry.archive not in archives:
            archives[entry.archive] = zipfile.ZipFile(entry.archive)
        return Sample(record, [archives[entry.archive].read(name) for name in entry.members])


def endless(entries: Sequence[Entry]) -> Iterator[Entry]:
    while True:
        yield from entries
