from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.storage.jsonl import Line, scan_lines

BOM = b"\xef\xbb\xbf"


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def test_line_ends_blank_lines_and_byte_order_mark() -> None:
    data = BOM + b'{"a":1}\r\n\n  \t\r\n{"b":2}\n\r\n{"c":"x\xe2\x80\xa8y"}'
    found = list(scan_lines([data]))
    assert [(line.number, line.data) for line in found] == [
        (1, b'{"a":1}'),
        (4, b'{"b":2}'),
        (6, b'{"c":"x\xe2\x80\xa8y"}'),
    ]
    assert found[0].offset == 3
    assert all(data[line.offset :][: line.length] == line.data for line in found)


def test_a_line_over_the_limit_is_reported_and_not_held() -> None:
    data = b"short\n" + b"x" * 50 + b"\nnext\n" + b"y" * 11
    for size in (1, 7, 100):
        assert list(scan_lines(cut(data, size), max_line_bytes=10)) == [
            Line(1, 0, 5, b"short"),
            Line(2, 6, 50, None),
            Line(3, 57, 4, b"next"),
            Line(4, 62, 11, None),
        ]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b" ", b"\r\n", BOM]), max_size=30),
    st.integers(1, 9),
)
def test_chunks_of_any_size_give_the_same_lines(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    expected = []
    offset = 0
    for number, raw in enumerate(data.split(b"\n"), start=1):
        start = 3 if offset == 0 and raw.startswith(BOM) else 0
        text = raw[start:].removesuffix(b"\r")
        if text.strip():
            expected.append(Line(number, offset + start, len(text), text))
        offset += len(raw) + 1
    assert list(scan_lines(cut(data, size))) == expected
