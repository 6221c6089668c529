from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dataservice.errors import StorageError
from dataservice.storage.journal import Journal, JournalDamaged

RECORDS: list[dict[str, Any]] = [
    {"kind": "epoch", "digest": "ab" * 8},
    {"kind": "hole", "key": "s/a.jsonl@12#0", "number": -5, "data": b"\x00\xff"},
    {"kind": "done", "cursor": {"lanes": [[1, 2], [3, 4]]}, "none": None},
]


def read(path: Path) -> list[dict[str, Any]]:
    journal, records = Journal.open(str(path))
    journal.close()
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def written(path: Path) -> tuple[bytes, list[int]]:
    """The bytes of a journal, and its end after each record."""
    journal, records = Journal.open(str(path))
    assert records == []
    ends = [journal.size_bytes]
    for record in RECORDS:
        journal.append(record)
        ends.append(journal.size_bytes)
    journal.close()
    return path.read_bytes(), ends


def test_records_come_back_and_more_can_follow(path: Path, written: object) -> None:
    journal, records = Journal.open(str(path))
    assert records == RECORDS
    journal.append({"more": 1})
    journal.close()
    journal.close()
    assert read(path) == [*RECORDS, {"more": 1}]


def test_cut_at_every_byte(path: Path, written: tuple[bytes, list[int]]) -> None:
    data, ends = written
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends[1:])
        journal, records = Journal.open(str(path))
        assert records == RECORDS[:whole]
        journal.append({"after": cut})
        journal.close()
        assert read(path) == [*RECORDS[:whole], {"after": cut}]


def test_flipped_at_every_byte(path: Path, written: tuple[bytes, list[int]]) -> None:
    data, ends = written
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        if at < ends[-2]:
            with pytest.raises(JournalDamaged, match="is no journal" if at < ends[0] else "byte"):
                Journal.open(str(path))
            assert path.read_bytes() == damaged
        else:
            assert read(path) == RECORDS[:-1]
            assert path.read_bytes() == data[: ends[-2]]


def test_zeros_at_the_end_are_a_torn_tail(path: Path, written: tuple[bytes, list[int]]) -> None:
    path.write_bytes(written[0] + bytes(5000))
    assert read(path) == RECORDS
    assert path.read_bytes() == written[0]


def test_one_writer(path: Path) -> None:
    journal, _ = Journal.open(str(path))
    with pytest.raises(StorageError, match="open in another process"):
        Journal.open(str(path))
    journal.close()
    assert read(path) == []


def test_a_failed_append_leaves_the_file_as_it_was(
    path: Path, written: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(str(path))

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left"):
            journal.append({"lost": 1})
        patch.setattr(os, "ftruncate", lambda fd, _: fail(fd))
        with pytest.raises(StorageError, match="No space left"):
            journal.append({"lost": 2})
        patch.undo()
        os.truncate(path, len(written[0]))
    assert path.read_bytes() == written[0]
    journal.append({"kept": 1})
    journal.close()
    assert read(path) == [*RECORDS, {"kept": 1}]


def test_another_file_is_not_touched(path: Path) -> None:
    path.write_bytes(b"notes of a person")
    with pytest.raises(JournalDamaged, match="is no journal of this version"):
        Journal.open(str(path))
    assert path.read_bytes() == b"notes of a person"
