"""Any bytes as a record: the same outcome by compiled decoders and without, in any process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataservice.errors import RecordError
from dataservice.storage.records import Record, RecordReader, parse_record
from dataservice.storage.records.fields import (
    INFO_FIELDS,
    PAIR_FIELDS,
    PART_FIELDS,
    TOP_FIELDS,
    TURN_FIELDS,
)
from dataservice.storage.records.values import is_plain
from dataservice.storage.sources import RecordFormat

READER = RecordReader()
FORMATS = (
    RecordFormat(),
    RecordFormat(
        placeholders=("<image_{n}>", "<image>"),
        mismatch="front",
        fields=(("text", "value"), ("content", "text"), ("image", "images"), ("images", "image")),
        roles=(("text", "user"),),
        data_uris=True,
    ),
    RecordFormat(layout="messages", placeholders=()),
)


def both(line: bytes, fmt: RecordFormat = FORMATS[0]) -> Record:
    """What `parse_record` gives, after the reader gave the same."""
    reader = READER if fmt == FORMATS[0] else RecordReader(fmt)
    ways: list[Callable[[], Record]] = [lambda: reader.read(line), lambda: parse_record(line, fmt)]
    outcomes: list[Any] = []
    for way in ways:
        try:
            outcomes.append(way())
        except RecordError as error:
            outcomes.append(error)
    first, second = outcomes
    if isinstance(second, RecordError):
        assert isinstance(first, RecordError) and first.reason == second.reason != ""
        raise second
    assert first == second
    return second


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xe9t\xe9"}', "invalid UTF-8 at byte 10"),
        (b'{"text": "a", "unread": "\xff"}', "invalid UTF-8 at byte 25"),
        (b'{"text": "a", "\xff": 1}', "invalid UTF-8 at byte 15"),
        (b'{"text": "cut', "not valid JSON at character"),
        (b'{"text": "a", "score": nan}', "not valid JSON"),
        (b'{"text": "a", "score": -NaN}', "not valid JSON"),
        (b'{"text": "a", "score": 1NaN}', "not valid JSON"),
        (b'{"text": NaN}', "must be a string, not null"),
        (b'{"text": "a", "unread": "\\z"}', "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
        (b'{"text": "a", "score": 01}', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"text": ' + b"[" * 100_000, "nested too deep"),
        (b"[" * 1_000_000, "nested too deep"),
        (b'{"a": ' + b'{"a": ' * 100_000, "nested too deep"),
        (b'{"text": "\\uZZZZ"}', "not valid JSON"),
        (b'{"text": "' + b'\\"' * 1_000_000, "not valid JSON"),
        (b'{"text": "' + b"\\ud83d" * 200_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 100_000 + b"e", "not valid JSON"),
    ],
)
def test_bytes_that_are_no_record(line: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason) as caught:
        both(line)
    assert len(caught.value.reason) < 200


def test_lone_surrogates_are_replaced_and_pairs_and_backslashes_kept() -> None:
    line = rb'{"text": "\ud83d \uDE00 \ud83d\ude00 \\ud83d \"\udc00", "unread\ud83d": "\ud83d"}'
    (turn,) = both(line).turns
    assert turn.pieces == ('\ufffd \ufffd \U0001f600 \\ud83d "\ufffd',)


def test_numbers_that_no_double_holds_are_large_ones() -> None:
    for number in (b"1e999", b"-1e999", b"9" * 5000, b"9" * 250 + b"e99", b"1E+0400"):
        line = b'{"text": "<image> 1e999", "image": "a", "width": %s, "height": 5}' % number
        record = both(line)
        assert record.sizes == (None,)
        assert record.turns[0].pieces == ("", " 1e999")
        assert both(b'{"text": "a", "unread": [%s, "\\ud83d"]}' % number) == both(b'{"text":"a"}')


def test_nan_and_infinity_are_null() -> None:
    line = b'{"text": "NaN", "a": NaN, "image": NaN, "b": [-Infinity, Infinity, 0.5], "c": 1e999}'
    assert both(line) == both(b'{"text": "NaN"}')


def test_of_a_key_given_twice_the_last_counts() -> None:
    assert both(b'{"text": 1, "text": "a", "text": "b"}').turns[0].pieces == ("b",)
    assert both(b'{"text": "a", "t\\u0065xt": "b"}').turns[0].pieces == ("b",)
    with pytest.raises(RecordError, match="must be a string, not a number"):
        both(b'{"text": "a", "text": 1}')


def test_the_depth_that_is_refused_depends_on_the_bytes_alone() -> None:
    def outcomes() -> list[str]:
        found = []
        for depth in (400, 900, 960, 980, 1000, 1023, 1024, 1100, 20_000):
            line = b'{"text": "[[", "unread": ' + b"[" * depth + b'"]"' + b"]" * depth + b"}"
            try:
                both(line)
                found.append("read")
            except RecordError as error:
                found.append(error.reason)
        return found

    def deeper(levels: int) -> list[str]:
        return outcomes() if levels == 0 else deeper(levels - 1)

    expected = ["read"] * 6 + ["nested too deep (more than 1024 levels)"] * 3
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(outcomes()))
    thread.start()
    thread.join(60)
    assert found == [expected]
    assert deeper(400) == expected


def test_many_shallow_brackets_are_not_deep() -> None:
    points = b"[" + b'[1, "]]["],' * 5000 + b"[]]"
    assert is_plain(b'{"text": "a", "points": ' + points + b"}")
    assert both(b'{"text": "a", "points": ' + points + b"}").turns[0].pieces == ("a",)


FIELDS = sorted({*TOP_FIELDS, *TURN_FIELDS, *PAIR_FIELDS, *INFO_FIELDS, *PART_FIELDS, "unread"})
STRINGS = st.one_of(
    st.sampled_from(
        ["user", "gpt", "text", "image", "image_url", "success", "a.png", "<image>", "<image_2>"]
    ),
    st.text(st.characters(exclude_categories=()), max_size=5),
)
ATOMS = st.one_of(
    STRINGS.map(json.dumps),
    st.sampled_from(["null", "true", "0", "1", "2", "-1", "1.0", "1e999", "9" * 400, "NaN"]),
    st.sampled_from(['"data:image/png;base64,AAAA"', r'"\ud83d"', r'"\ud83d\ude00"', "18e17"]),
)


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Some with a key twice, or with escapes in it."""
    plain = st.sampled_from(FIELDS).map(json.dumps)
    keys = plain | plain.map(lambda key: f'"\\u{ord(key[1]):04x}{key[2:]}')
    pairs = st.tuples(keys, values).map(": ".join)
    return st.lists(pairs, max_size=5).map(lambda pairs: "{" + ", ".join(pairs) + "}")


def lists(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, max_size=3).map(lambda values: "[" + ", ".join(values) + "]")


VALUES = st.recursive(ATOMS, lambda inner: objects(inner) | lists(inner), max_leaves=10)


@st.composite
def near_records(draw: st.DrawFn) -> str:
    """Of the shape that a layout wants, but for what is wrong in it."""
    mark = st.sampled_from(['"<image>"', '"<image_1>"', '"a"', '"<image> and <image>"', '""'])
    text = st.one_of(mark, mark, mark, VALUES)
    part = st.one_of(
        text.map('{{"type": "text", "text": {}}}'.format),
        st.just('{"type": "image"}'),
        text.map('{{"type": "image", "image": {}}}'.format),
        text.map('{{"type": "image_url", "image_url": {{"url": {}}}}}'.format),
        VALUES,
    )
    turn = st.one_of(
        text.map('{{"from": "human", "value": {}}}'.format),
        st.one_of(text, lists(part)).map('{{"role": "user", "content": {}}}'.format),
        st.tuples(text, text).map(lambda two: f'{{"user": {two[0]}, "assistant": {two[1]}}}'),
        text,
        objects(text),
    )
    info = text.map('{{"image_name": {}, "matched_text_index": 0}}'.format) | turn
    images = st.sampled_from(['"a"', '["a"]', '["a", "b"]', "[null]", "null", '[null, "a"]']) | text
    pairs = []
    for field, values in (
        (st.sampled_from(["conversations", "messages", "texts", "text_list"]), lists(turn)),
        (st.sampled_from(["text", "caption", "key", "width"]), text),
        (st.sampled_from(["image", "images", "image_name"]), images),
        (st.sampled_from(["image_info", "width_list", "video", "unread"]), lists(info)),
    ):
        if draw(st.booleans()):
            pairs.append(f'"{draw(field)}": {draw(values)}')
    return "{" + ", ".join(draw(st.permutations(pairs))) + "}"


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)


@st.composite
def good_records(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "b.png", "ä"]), max_size=2))
    marks = draw(st.lists(TEXT, min_size=len(names) + 1, max_size=len(names) + 1))
    text, other = "<image>".join(marks), draw(TEXT)
    parts = [{"type": "text", "text": text}, *({"type": "image"} for _ in names)]
    record: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"conversations": [{"from": "human", "value": text, "unread": [1]}]},
                {"conversations": [{"from": "system", "value": other}] * 2, "text": 1},
                {"messages": [{"role": "user", "content": text, "name": None}]},
                {"messages": [{"role": "user", "content": parts[:1]}, {"role": "", "from": "gpt"}]},
                {"messages": [{"role": "user", "content": parts[1:]}]},
                {"messages": [{"from": "gpt", "content": [{"type": "image", "image": other}]}]},
                {"texts": [{"user": text, "assistant": other}]},
                {"texts": [other, None, other]},
                {"text_list": [other, text], "image_info": None},
                {"text_list": [other], "image_info": [{"image_name": "a"}]},
                {"caption": other, "key": "7", "status": "success"},
                {"caption": None, "key": "7", "status": "failed", "error_message": other},
                {"key": "7", "status": "failed", "error_message": other},
                {"text": text},
            ]
        )
    )
    listed: Any = [None, "c", None] if record.get("texts", [0])[0] == other else names
    more = st.sampled_from(
        [{}, {"width": 3, "height": 4}, {"width_list": [1, 2], "height_list": [1, 1.0]}]
    )
    for info in record.get("image_info") or ():
        info["matched_text_index"] = draw(st.integers(0, 1))
    unread = {"unread": {"deep": [[1.5, None], {"\n": "\ud83d"}]}}
    return {**unread, **record, "images": listed, **draw(more)}


def written(record: object) -> st.SearchStrategy[bytes]:
    return st.booleans().map(
        lambda ascii: json.dumps(record, ensure_ascii=ascii).encode(errors="replace")
    )


NEAR = near_records().map(str.encode)
GOOD = good_records().flatmap(written)
LINES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(str.encode),
    NEAR,
    GOOD,
    GOOD,
    st.lists(NEAR | GOOD, max_size=3).map(lambda items: b"[" + b", ".join(items) + b"]"),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    line = bytearray(draw(LINES))
    for _ in range(max(0, draw(st.integers(-3, 2)))):
        at = draw(st.integers(0, len(line)))
        line[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"\\", b"[", b"}", b",", b"\xff", b" ", b"e", b"\n", b"1"])
        )
    return bytes(line)


@settings(deadline=None, max_examples=1500)
@given(line=damaged(), fmt=st.sampled_from(FORMATS))
@example(line=b'{"texts": [], "images": []}', fmt=FORMATS[0])
@example(line=b'{"width": 1e999, "text": "<image>", "image": "\\ud83d"}', fmt=FORMATS[0])
def test_any_bytes_give_the_same_record_or_reason_both_ways(line: bytes, fmt: RecordFormat) -> None:
    try:
        record = both(line, fmt)
    except RecordError:
        return
    assert sum(len(turn.pieces) - 1 for turn in record.turns) == len(record.images)
    assert len(record.sizes) == len(record.images)
    assert record.turns and all(record.images)
    assert record.starts[0] == 0 and list(record.starts) == sorted(set(record.starts))
    assert record.starts[-1] < len(record.turns)
    "".join(piece for turn in record.turns for piece in turn.pieces).encode()
    "".join(record.images).encode()
