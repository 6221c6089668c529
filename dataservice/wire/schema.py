"""Dataclass messages to msgpack and back, strict in both directions, driven by their type hints.

Invariants:
- a message is a msgpack map of all its field names, in the order of the fields: equal messages
  give equal bytes;
- types are exact: a bool is no int, a numpy integer is no int, an array is a tuple; only a float
  field takes an int; NaN and infinities are refused;
- a field may be missing only if it has a default (so versions may differ by added fields);
  unknown fields, repeated map keys, ext types and trailing bytes are refused;
- nothing is allocated for an array or map whose elements are not in the message, and the sizes
  below are checked before allocation.

Converters are compiled once a class, so that a step of 16,000 packs decodes in tens of
milliseconds. Every refusal is a WireError naming message, field and what was expected.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from dataservice.errors import WireError

__all__ = [
    "MAX_ARRAY_LENGTH",
    "MAX_MAP_LENGTH",
    "MAX_MESSAGE_BYTES",
    "MAX_TEXT_BYTES",
    "decode",
    "decode_plain",
    "encode",
    "encode_plain",
]

MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_BYTES = 16 << 20
"""Of one str (as UTF-8) or bytes value."""
MAX_ARRAY_LENGTH = 1 << 17
MAX_MAP_LENGTH = 1 << 17
MAX_PLAIN_DEPTH = 8

Message = TypeVar("Message")
Buffer = bytes | bytearray | memoryview
Convert = Callable[[Any], Any]


def encode(message: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The bytes of a dataclass message. WireError when a value does not fit its field's type."""
    cls: Any = type(message)
    try:
        return _pack(_writer(cls)(message), cls.__name__, max_bytes)
    except _Mismatch as bad:
        raise bad.wire_error(cls.__name__) from None


def decode(cls: type[Message], data: Buffer, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message of class `cls` that `data` holds. WireError when it does not hold one."""
    value = _unpack(data, cls.__name__, max_bytes)
    try:
        return typing.cast(Message, _reader(typing.cast(Any, cls))(value))
    except _Mismatch as bad:
        raise bad.wire_error(cls.__name__) from None


def encode_plain(value: Any, *, what: str) -> bytes:
    """The bytes of a value made of None, bool, int, float, str, list, tuple and dict[str, ...]."""
    try:
        return _pack(_plain(value, MAX_PLAIN_DEPTH), what)
    except _Mismatch as bad:
        raise bad.wire_error(what) from None


def decode_plain(data: Buffer, *, what: str) -> Any:
    """The JSON-typed value in `data` (arrays as lists). `what` names it in a WireError."""
    value = _unpack(data, what)
    try:
        return _plain(value, MAX_PLAIN_DEPTH)
    except _Mismatch as bad:
        raise bad.wire_error(what) from None


class _Mismatch(Exception):
    """A value that does not fit; the path to it is collected while the exception unwinds."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def wire_error(self, message: str) -> WireError:
        return WireError(f"{message}{''.join(reversed(self.path))}: {self.reason}")


# ---- bytes <-> plain values ---------------------------------------------------------------------


def _pack(value: Any, what: str, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except OverflowError:
        raise WireError(f"{what}: an integer does not fit in 64 bits") from None
    except UnicodeEncodeError as error:
        raise WireError(f"{what}: text that is not Unicode: {error}") from None
    if len(data) > max_bytes:
        raise WireError(f"{what}: {len(data)} bytes, more than the limit of {max_bytes}")
    return data


def _unpack(data: Buffer, what: str, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    size = len(data)
    if size > max_bytes:
        raise WireError(f"{what}: {size} bytes, more than the limit of {max_bytes}")
    try:
        # Walks the structure without building it: a header that claims more elements than the
        # message holds ends here, before unpackb would allocate for the claim.
        walker = msgpack.Unpacker(max_buffer_size=size)
        walker.feed(data)
        walker.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_map_of_pairs,
            ext_hook=_refuse_ext,
            max_str_len=min(size, MAX_TEXT_BYTES),
            max_bin_len=min(size, MAX_TEXT_BYTES),
            max_array_len=min(size, MAX_ARRAY_LENGTH),
            max_map_len=min(size, MAX_MAP_LENGTH),
            max_ext_len=0,
        )
    except (msgpack.UnpackException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise WireError(f"{what}: not a message of ours ({reason})") from None


def _map_of_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map repeats a key")
    return result


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise ValueError(f"ext type {code} is not allowed")


# ---- converters ---------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _bool(value: Any) -> Any:
    if type(value) is not bool:
        raise _Mismatch(f"expected a bool, got {_kind(value)}")
    return value


def _int(value: Any) -> Any:
    if type(value) is not int:
        raise _Mismatch(f"expected an int, got {_kind(value)}")
    return value


def _float(value: Any) -> Any:
    if type(value) is int:
        return float(value)
    if type(value) is not float:
        raise _Mismatch(f"expected a float, got {_kind(value)}")
    if not math.isfinite(value):
        raise _Mismatch(f"expected a finite float, got {value}")
    return value


def _str(value: Any) -> Any:
    if type(value) is not str:
        raise _Mismatch(f"expected a str, got {_kind(value)}")
    if len(value) > MAX_TEXT_BYTES:
        raise _Mismatch(f"expected a str of at most {MAX_TEXT_BYTES} bytes, got {len(value)}")
    return value


def _bytes(value: Any) -> Any:
    if type(value) is not bytes:
        raise _Mismatch(f"expected bytes, got {_kind(value)}")
    if len(value) > MAX_TEXT_BYTES:
        raise _Mismatch(f"expected at most {MAX_TEXT_BYTES} bytes, got {len(value)}")
    return value


_SCALARS: dict[Any, Convert] = {bool: _bool, int: _int, float: _float, str: _str, bytes: _bytes}


def _optional(inner: Convert) -> Convert:
    def convert(value: Any) -> Any:
        return None if value is None else inner(value)

    return convert


def _array_of(item: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not tuple:
            raise _Mismatch(f"expected an array, got {_kind(value)}")
        if len(value) > MAX_ARRAY_LENGTH:
            raise _Mismatch(f"expected at most {MAX_ARRAY_LENGTH} elements, got {len(value)}")
        result = []
        try:
            for element in value:
                result.append(item(element))  # its length is the index of a failure
        except _Mismatch as bad:
            bad.path.append(f"[{len(result)}]")
            raise
        return tuple(result)

    return convert


def _map_of(item: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch(f"expected a map, got {_kind(value)}")
        if len(value) > MAX_MAP_LENGTH:
            raise _Mismatch(f"expected at most {MAX_MAP_LENGTH} entries, got {len(value)}")
        result = {}
        for key, element in value.items():
            if type(key) is not str:
                raise _Mismatch(f"expected a map with str keys, got a key of type {_kind(key)}")
            try:
                result[key] = item(element)
            except _Mismatch as bad:
                bad.path.append(f"[{key!r}]")
                raise
        return result

    return convert


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return _float(value)
    if depth == 0:
        raise _Mismatch(f"nested deeper than {MAX_PLAIN_DEPTH}")
    if type(value) in (tuple, list):
        return list(_array_of(lambda element: _plain(element, depth - 1))(tuple(value)))
    if type(value) is dict:
        return _map_of(lambda element: _plain(element, depth - 1))(value)
    raise _Mismatch(f"expected None, bool, int, float, str, list or map, got {_kind(value)}")


# ---- compiled once a class ----------------------------------------------------------------------


def _compile(hint: Any, message: Callable[[type], Convert]) -> Convert:
    """The converter for a type hint; `message` gives the one for a nested message class."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return message(typing.cast(type, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _array_of(_compile(arguments[0], message))
    if origin is dict and arguments[0] is str:
        return _map_of(_compile(arguments[1], message))
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2:
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1:
            return _optional(_compile(inner[0], message))
    raise TypeError(f"{hint} is no type of a message field; see dataservice.wire.messages")


def _fields(cls: type, message: Callable[[type], Convert]) -> list[tuple[str, Convert, bool]]:
    """Per field: name, converter, whether it must be there."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no message: not a dataclass")
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return [
        (
            field.name,
            _compile(hints[field.name], message),
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(cls)
    ]


@functools.cache
def _reader(cls: Any) -> Convert:
    fields = _fields(cls, _reader)
    known = frozenset(name for name, _, _ in fields)

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch(f"expected a map ({cls.__name__}), got {_kind(value)}")
        arguments = {}
        name = ""
        try:
            for name, item, required in fields:
                if name in value:
                    arguments[name] = item(value[name])
                elif required:
                    raise _Mismatch("the field is missing")
        except _Mismatch as bad:
            bad.path.append(f".{name}")
            raise
        if len(arguments) != len(value):
            unknown = next(key for key in value if key not in known)
            raise _Mismatch(f"unknown field {unknown!r}")
        return cls(**arguments)

    return convert


@functools.cache
def _writer(cls: Any) -> Convert:
    fields = [(name, item) for name, item, _ in _fields(cls, _writer)]

    def convert(value: Any) -> Any:
        if type(value) is not cls:
            raise _Mismatch(f"expected {cls.__name__}, got {_kind(value)}")
        result = {}
        name = ""
        try:
            for name, item in fields:
                result[name] = item(getattr(value, name))
        except _Mismatch as bad:
            bad.path.append(f".{name}")
            raise
        return result

    return convert
