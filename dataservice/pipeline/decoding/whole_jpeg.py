"""A JPEG (ITU T.81) whose data end before its last row is an error, not a picture half in gray.

Invariants: pixels are those of Pillow. What libjpeg fills up where data of one scan end early, be
it at an end marker or at a stray one, is found by the last row: it is never written. Data that
lack less than four blocks of a picture are not told apart. Pictures in several scans are decoded as
they are: where their data end, they have less detail.
"""

from __future__ import annotations

import io
import re
from typing import Any

from PIL.JpegImagePlugin import JpegImageFile

from dataservice.errors import ImageError

_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""A marker that ends the data of a scan."""
_FILLING = b"\xff\x00" * 12
"""What the decoder looks ahead at behind the last bits; no code, so that it makes few blocks."""
_HUFFMAN, _FRAMES, _SCAN = (0xC0, 0xC1), (0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xD0)), 0xDA
_ALONE = frozenset((*range(0xC0), *range(0xD0, 0xDA)))
"""What no segment stands behind."""
_MARKS = 8
_INKS = (1, 254, 3, 251), (253, 2, 250, 5)
_LEAST_MARKED_BYTES = 4


class WholeJpeg(JpegImageFile):  # type: ignore[misc, unused-ignore]
    """Reads the first picture of a file; `load` raises ImageError where its data end too early."""

    _marks: dict[int, Any]
    """Ink by column of the last row, before it is decoded."""

    def __init__(self, data: bytes) -> None:
        self._stop, self._filled = _end_of_only_scan(data), False
        self._file = io.BytesIO(data)
        super().__init__(self._file)

    def load_prepare(self) -> None:
        super().load_prepare()
        width, height = self.size
        bands = len(self.getbands())
        columns = sorted({i * (width - 1) // (_MARKS - 1) for i in range(_MARKS)})
        self._marks = {}
        if len(columns) * bands >= _LEAST_MARKED_BYTES:
            for number, column in enumerate(columns):
                ink: Any = _INKS[number % 2][:bands] if bands > 1 else _INKS[number % 2][number % 4]
                self._marks[column] = ink
                self.im.putpixel((column, height - 1), ink)

    def load_read(self, read_bytes: int) -> bytes:
        """Called when the decoder needs more than it has."""
        at = self._file.tell()
        if at < self._stop:
            data = self._file.read(min(read_bytes, self._stop - at))
            return data + _FILLING if at + len(data) == self._stop else data
        if at == self._stop and not self._filled:
            self._filled = True
            self._check_last_row()
        return bytes(super().load_read(read_bytes))

    def _check_last_row(self) -> None:
        last = self.size[1] - 1
        if self._marks and all(
            self.im.getpixel((column, last)) == ink for column, ink in self._marks.items()
        ):
            raise ImageError("truncated JPEG: its data end before its last row")


def only_scan(data: bytes) -> int:
    """Where the data of the first scan start, if all components are in it, so that a decoder looks
    at no other; -1 for other pictures."""
    at, components = 2, -1
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in _FRAMES or marker in _ALONE:
            return -1
        if marker == 0xFF:
            at += 1
            continue
        if marker in _HUFFMAN and at + 10 <= len(data):
            components = data[at + 9]
        elif marker == _SCAN:
            start = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            return start if at + 4 < len(data) and data[at + 4] == components else -1
        at += 2 + max(int.from_bytes(data[at + 2 : at + 4], "big"), 2)
    return -1


def _end_of_only_scan(data: bytes) -> int:
    start = only_scan(data)
    found = _END.search(data, start) if start >= 0 else None
    return found.start() if found else -1
