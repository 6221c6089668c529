"""An append-only file of small maps that survives a crash at any moment.

A record is a mark, the payload's length, a CRC-32 over length and payload, and the payload
(msgpack). Invariants: `append` returns once the record is on disk; after a crash the file holds
every record that `append` returned for, and of others at most those of one call; what a crash can
leave (an unfinished last record) is cut off when opened, damage before a good record is refused, so
that no acknowledged record before others is lost in silence; one process writes at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from typing import Any

import msgpack

from dataservice.errors import StorageError
from dataservice.storage.tables import sync_folder

_LOG = logging.getLogger(__name__)

MAX_RECORD_BYTES = 16 * 1024 * 1024
_FILE_MARK = b"vlm-dataservice journal 1\n"
_RECORD_MARK = b"\x9eJR\n"
_HEAD = struct.Struct("<4sII")


class JournalDamaged(StorageError):
    """The journal is damaged before its end, or is no journal; it is not touched."""


class Journal:
    """Open one with `Journal.open`; use it from one thread."""

    def __init__(self, path: str, fd: int, end: int) -> None:
        self.path = path
        self._fd = fd
        self._end = end

    @classmethod
    def open(cls, path: str) -> tuple[Journal, list[dict[str, Any]]]:
        """The journal, made if missing, and its records in order.

        Raises JournalDamaged, and StorageError when another process has it open, as far as the file
        system has locks.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(f"journal {path} is open in another process") from None
            except OSError as error:  # a file system without locks, such as Lustre's default
                _LOG.warning("journal %s cannot be locked: %s", path, error)
            data = _read_all(fd)
            if data != _FILE_MARK and _FILE_MARK.startswith(data):
                _write_all(fd, _FILE_MARK, 0)
                data = _FILE_MARK
            if not data.startswith(_FILE_MARK):
                raise JournalDamaged(f"{path} is no journal of this version")
            records, end = _parse(path, data)
            if end < len(data):
                os.ftruncate(fd, end)
            os.fsync(fd)
            sync_folder(os.path.dirname(os.path.abspath(path)))
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, end), records

    @property
    def size_bytes(self) -> int:
        return self._end

    def append(self, *records: dict[str, Any]) -> None:
        """Make the records durable. Raises StorageError; the file then is as it was before.

        Several only into a file that a crash loses as a whole: they come to the disk in any order.
        """
        framed = [_framed(record) for record in records]
        end = self._end
        try:
            for data in framed:
                _write_all(self._fd, data, end)
                end += len(data)
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):  # what is left there is written over, or cut off
                os.ftruncate(self._fd, self._end)
            raise StorageError(f"journal {self.path} cannot be written: {error}") from error
        self._end = end

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_journal(path: str) -> list[dict[str, Any]]:
    """The records of a journal that may be open in another process; changes nothing, and leaves out
    an unfinished last one. Raises JournalDamaged, and OSError where there is none."""
    with open(path, "rb") as file:
        data = file.read()
    if not data.startswith(_FILE_MARK):
        raise JournalDamaged(f"{path} is no journal of this version")
    return _parse(path, data)[0]


def _parse(path: str, data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records, and the end of the last good one."""
    records = []
    at = len(_FILE_MARK)
    while at < len(data):
        payload = _payload(data, at)
        if payload is None:
            later = data.find(_RECORD_MARK, at + 1)
            while later >= 0:
                if _payload(data, later) is not None:
                    raise JournalDamaged(
                        f"{path} is damaged at byte {at}, and records follow at byte {later}; "
                        "restore it from a copy, or remove it to start without its history"
                    )
                later = data.find(_RECORD_MARK, later + 1)
            break
        record = _unpack(payload)
        if record is None:
            raise JournalDamaged(f"{path} holds a record at byte {at} that is no map")
        records.append(record)
        at += _HEAD.size + len(payload)
    return records, at


def _framed(record: dict[str, Any]) -> bytes:
    payload: bytes = msgpack.packb(record)
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a journal record of {len(payload)} bytes, over {MAX_RECORD_BYTES}")
    return _HEAD.pack(_RECORD_MARK, len(payload), _checksum(payload)) + payload


def _unpack(payload: bytes) -> dict[str, Any] | None:
    try:
        record = msgpack.unpackb(payload, strict_map_key=True)
    except (ValueError, msgpack.UnpackException):
        return None
    return record if isinstance(record, dict) else None


def _payload(data: bytes, at: int) -> bytes | None:
    """The payload of the record at `at`; None when there is no whole, good one."""
    if at + _HEAD.size > len(data):
        return None
    mark, length, checksum = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    if mark != _RECORD_MARK or length > MAX_RECORD_BYTES or len(payload) != length:
        return None
    return payload if _checksum(payload) == checksum else None


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<I", len(payload))))


def _read_all(fd: int) -> bytes:
    parts = []
    offset = 0
    while part := os.pread(fd, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
