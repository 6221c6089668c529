"""JSON of one record to Python values, without a limit that depends on the process.

Invariants: any bytes give a value or a RecordError; at most 1,024 levels; of a key given twice the
last counts; a lone surrogate escape becomes U+FFFD; a number beyond a double's range is a large
one; NaN and Infinity, which are no JSON but which pandas writes, are null; bytes that are not UTF-8
are refused wherever they stand. No input recurses or crashes; the time grows with its length.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import orjson

from dataservice.errors import RecordError

MAX_DEPTH = 1024
"""Levels that orjson follows; what another reader finds is used for lines of no more."""

_LONG = 16_384
"""Bytes from which numpy, with its microseconds a call, counts faster."""
_STRING = rb'"(?:[^"\\]++|\\.)*+"?+'  # also one without an end, so that no search starts inside it
_STRINGS = re.compile(_STRING, re.DOTALL)
_ODD = re.compile(rb"NaN|Infinity|[0-9]{200}|[eE]\+?[0-9]{3}")
_ODD_OR_STRING = re.compile(
    rb"(?P<word>-?Infinity|NaN)"
    # An optional group is not possessive: before Python 3.11.5 it takes part of what it gave up.
    rb"|(?<![0-9.])(?P<number>-?(?:[0-9]{200,}+(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?"
    rb"|[0-9]++(?:\.[0-9]++)?[eE]\+?[0-9]{3,}+))"
    rb"|" + _STRING,
    re.DOTALL,
)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


def load(line: bytes) -> Any:
    """Raises RecordError saying what is wrong with the bytes, and where."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        first = error
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        raise RecordError(f"invalid UTF-8 at byte {bad.start} of the record") from None
    repaired = _ESCAPE.sub(lambda m: rb"\ufffd" if m["lone"] else m[0], line)
    if _ODD.search(repaired):
        repaired = _ODD_OR_STRING.sub(_as_json, repaired)
    if repaired != line:
        try:
            return orjson.loads(repaired)
        except orjson.JSONDecodeError as error:
            first = error
    if "depth" in first.msg:
        raise RecordError(f"nested too deep (more than {MAX_DEPTH} levels)") from None
    raise RecordError(f"not valid JSON at character {first.pos}: {first.msg}") from None


def is_plain(line: bytes) -> bool:
    """Whether it is UTF-8 and of no more than MAX_DEPTH levels, if it is JSON at all."""
    if not line.isascii():
        try:
            line.decode()
        except UnicodeDecodeError:
            return False
    return len(line) <= MAX_DEPTH or _openers(line) <= MAX_DEPTH or _depth(line) <= MAX_DEPTH


def _openers(line: bytes) -> int:
    if len(line) < _LONG:
        return line.count(b"[") + line.count(b"{")
    letters = np.frombuffer(line, np.uint8)
    return int(np.count_nonzero(letters == ord("[")) + np.count_nonzero(letters == ord("{")))


def _depth(line: bytes) -> int:
    brackets = _STRINGS.sub(b"", line).translate(None, _NO_BRACKETS)
    return int(np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)], dtype=np.int64).max(initial=0))


def _as_json(match: re.Match[bytes]) -> bytes:
    if match["word"] is not None:
        return b"null"
    number = match["number"]
    return b"1e308" if number is not None and math.isinf(float(number)) else match[0]


def kind(value: Any) -> str:
    """What a JSON value is, for a person."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def quoted(text: str, limit: int = 40) -> str:
    """For a message: never more than `limit` characters of it."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
