"""dataservice.wire.schema: exact types, limits, readable refusals."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import dataclass

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.errors import WireError
from dataservice.wire import schema
from dataservice.wire.schema import decode, decode_plain, encode, encode_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    name: str
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Everything:
    flag: bool
    number: int
    ratio: float
    text: str
    data: bytes
    maybe: Leaf | None
    numbers: tuple[int, ...]
    grid: tuple[tuple[Leaf, ...], ...]
    reasons: dict[str, str]
    later: int = 7
    optional: tuple[str, ...] | None = None


LEAF = Leaf(name="a", number=3)
FULL = Everything(
    flag=True,
    number=-5,
    ratio=0.5,
    text="größe",
    data=b"\x00\xff",
    maybe=LEAF,
    numbers=(1, 2**63, -(2**63)),
    grid=((LEAF,), (), (LEAF, LEAF)),
    reasons={"k": "v"},
)


def plain(**changes: object) -> dict[str, object]:
    """FULL as plain msgpack values, some changed."""
    leaf = {"name": "a", "number": 3}
    value: dict[str, object] = {
        "flag": True,
        "number": -5,
        "ratio": 0.5,
        "text": "größe",
        "data": b"\x00\xff",
        "maybe": leaf,
        "numbers": [1, 2**63, -(2**63)],
        "grid": [[leaf], [], [leaf, leaf]],
        "reasons": {"k": "v"},
        "later": 7,
        "optional": None,
    }
    return {**value, **changes}


def test_a_message_is_a_map_of_its_fields_in_order() -> None:
    assert encode(FULL) == msgpack.packb(plain())
    assert decode(Everything, encode(FULL)) == FULL


leaves = st.builds(Leaf, name=st.text(max_size=5), number=st.integers(-(2**63), 2**64 - 1))
messages = st.builds(
    Everything,
    flag=st.booleans(),
    number=st.integers(-(2**63), 2**64 - 1),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(max_size=20),
    data=st.binary(max_size=20),
    maybe=st.none() | leaves,
    numbers=st.lists(st.integers(-9, 9), max_size=5).map(tuple),
    grid=st.lists(st.lists(leaves, max_size=3).map(tuple), max_size=3).map(tuple),
    reasons=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    later=st.integers(0, 3),
    optional=st.none() | st.lists(st.text(max_size=3), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=100)
@given(messages)
def test_round_trip(message: Everything) -> None:
    data = encode(message)
    again = decode(Everything, memoryview(data))
    assert again == message
    assert encode(again) == data


def test_a_field_with_a_default_may_be_missing_and_no_other() -> None:
    value = plain()
    del value["later"], value["optional"]
    assert decode(Everything, msgpack.packb(value)) == FULL
    del value["number"]
    with pytest.raises(WireError, match=r"^Everything\.number: the field is missing$"):
        decode(Everything, msgpack.packb(value))


def test_a_float_field_takes_an_int() -> None:
    assert decode(Everything, msgpack.packb(plain(ratio=2))).ratio == 2.0
    assert isinstance(decode(Everything, msgpack.packb(plain(ratio=2))).ratio, float)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"flag": 1}, "Everything.flag: expected a bool, got int"),
        ({"number": True}, "Everything.number: expected an int, got bool"),
        ({"number": 1.0}, "Everything.number: expected an int, got float"),
        ({"number": None}, "Everything.number: expected an int, got nothing"),
        ({"ratio": float("nan")}, "Everything.ratio: expected a finite float, got nan"),
        ({"ratio": float("inf")}, "Everything.ratio: expected a finite float, got inf"),
        ({"ratio": True}, "Everything.ratio: expected a float, got bool"),
        ({"ratio": "1"}, "Everything.ratio: expected a float, got str"),
        ({"text": b"x"}, "Everything.text: expected a str, got bytes"),
        ({"data": "x"}, "Everything.data: expected bytes, got str"),
        ({"maybe": []}, "Everything.maybe: expected a map (Leaf), got tuple"),
        ({"maybe": {"name": "a"}}, "Everything.maybe.number: the field is missing"),
        ({"numbers": {}}, "Everything.numbers: expected an array, got dict"),
        ({"numbers": [1, "2"]}, "Everything.numbers[1]: expected an int, got str"),
        (
            {"grid": [[], [{"name": "a", "number": 1}, {"name": 2, "number": 1}]]},
            "Everything.grid[1][1].name: expected a str, got int",
        ),
        ({"reasons": {"k": 1}}, "Everything.reasons['k']: expected a str, got int"),
        (
            {"reasons": {b"k": "v"}},
            "Everything.reasons: expected a map with str keys, got a key of type bytes",
        ),
        ({"surprise": 1}, "Everything: unknown field 'surprise'"),
    ],
)
def test_a_wrong_value_is_refused_by_message_field_and_type(
    changes: dict[str, object], text: str
) -> None:
    with pytest.raises(WireError) as caught:
        decode(Everything, msgpack.packb(plain(**changes)))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"number": np.int64(3)}, "Everything.number: expected an int, got int64"),
        ({"numbers": [1]}, "Everything.numbers: expected an array, got list"),
        ({"grid": ((LEAF, None),)}, "Everything.grid[0][1]: expected Leaf, got nothing"),
        ({"number": 2**64}, "Everything: an integer does not fit in 64 bits"),
        ({"text": "\ud800"}, "Everything: text that is not Unicode"),
    ],
)
def test_a_sender_cannot_encode_a_wrong_value(changes: dict[str, object], text: str) -> None:
    fields = {name: getattr(FULL, name) for name in Everything.__slots__}
    with pytest.raises(WireError) as caught:
        encode(Everything(**{**fields, **changes}))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(FULL)[:-1],
        encode(FULL) + b"\x00",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb(plain(text=msgpack.ExtType(5, b"x"))),
        msgpack.packb(plain(text=msgpack.ExtType(5, b""))),
        msgpack.packb(plain(number=msgpack.Timestamp(1))),
        b"\x82\xa4name\xa1a\xa4name\xa1b",
        b"\x81\xa4name\xa1\xff",
    ],
    ids=[
        "empty",
        "reserved byte",
        "cut",
        "trailing byte",
        "no map",
        "int key",
        "ext type",
        "empty ext type",
        "timestamp",
        "repeated key",
        "invalid UTF-8",
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError, match=r"^Everything"):
        decode(Everything, data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        message = decode(Leaf, data)
    except WireError:
        return
    assert decode(Leaf, encode(message)) == message


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_changed_byte_gives_a_valid_message_or_a_wire_error(data: st.DataObject) -> None:
    good = bytearray(encode(FULL))
    good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        message = decode(Everything, good)
    except WireError:
        return
    assert decode(Everything, encode(message)) == message


@pytest.mark.parametrize(
    "bomb",
    [
        struct.pack(">BI", 0xDD, schema.MAX_ARRAY_LENGTH) * 1000,
        struct.pack(">BI", 0xDF, schema.MAX_MAP_LENGTH) + b"\xa0",
        struct.pack(">BI", 0xDD, 2**32 - 1),
        b"\x91" * 100_000,
        struct.pack(">BI", 0xC6, 2**32 - 1),
    ],
    ids=["nested array claims", "map claim", "array claim", "depth", "bytes claim"],
)
def test_a_claim_without_content_allocates_nothing(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(Leaf, bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_sizes_are_limited_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    long_array = Everything(
        **{name: getattr(FULL, name) for name in Everything.__slots__ if name != "numbers"},
        numbers=(0,) * 11,
    )
    data = encode(long_array)
    monkeypatch.setattr(schema, "MAX_ARRAY_LENGTH", 10)
    with pytest.raises(WireError, match="at most 10 elements, got 11"):
        encode(long_array)
    with pytest.raises(WireError):
        decode(Everything, data)
    monkeypatch.setattr(schema, "MAX_TEXT_BYTES", 4)
    with pytest.raises(WireError, match="at most 4 bytes, got 5"):
        encode(Leaf(name="12345", number=1))
    with pytest.raises(WireError):
        decode(Leaf, msgpack.packb({"name": "12345", "number": 1}))
    with pytest.raises(WireError, match="limit of 10"):
        decode(Leaf, encode_plain({"a": 1}, what="x") * 10, max_bytes=10)
    with pytest.raises(WireError, match="limit of 10"):
        encode(LEAF, max_bytes=10)


def test_a_class_with_another_kind_of_field_is_a_bug_of_ours() -> None:
    @dataclass
    class Listy:
        items: list[int]

    with pytest.raises(TypeError, match="no type of a message field"):
        encode(Listy(items=[1]))
    with pytest.raises(TypeError, match="not a dataclass"):
        encode(3)


def test_plain_values_keep_their_json_types() -> None:
    value = {"a": [1, [2.5, None]], "b": {"c": True, "d": "x"}}
    assert decode_plain(encode_plain(value, what="meta"), what="meta") == value
    assert decode_plain(encode_plain({"a": (1, 2)}, what="meta"), what="meta") == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [np.int64(1)]}, r"^meta\['a'\]\[0\]: expected None, bool"),
        ({1: 2}, r"^meta: expected a map with str keys, got a key of type int"),
        ({"a": b"x"}, r"^meta\['a'\]: expected None, bool"),
        ([[[[[[[[[1]]]]]]]]], r"nested deeper than 8"),
        (float("nan"), r"^meta: expected a finite float"),
    ],
)
def test_plain_values_of_other_types_are_refused(value: object, text: str) -> None:
    with pytest.raises(WireError, match=text):
        encode_plain(value, what="meta")
