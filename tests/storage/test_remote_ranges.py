from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.errors import StorageError
from dataservice.storage.remote.ranges import (
    range_header,
    read_body,
    total_bytes,
    version_stat,
)

OBJECT = bytes(range(256))


def read(
    body: bytes, *, content_range: str | None, offset: int, size: int, piece: int = 7
) -> tuple[bytes, int]:
    """What `read_body` makes of an answer about OBJECT, and how much of the body it took."""
    taken = 0

    async def some(most: int) -> bytes:
        nonlocal taken
        data = body[taken : taken + min(most, piece)]
        taken += len(data)
        return data

    data = asyncio.run(
        read_body(
            "s3://b/k",
            some,
            content_range=content_range,
            total=len(OBJECT),
            offset=offset,
            size=size,
        )
    )
    return data, taken


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_any_range_of_servers_with_and_without_ranges(
    offset: int, size: int, piece: int, ranges: bool
) -> None:
    wanted = OBJECT[offset : offset + size]
    content_range = f"bytes {offset}-{offset + len(wanted) - 1}/256" if ranges else None
    body = wanted if ranges else OBJECT
    data, taken = read(body, content_range=content_range, offset=offset, size=size, piece=piece)
    assert data == wanted
    assert taken <= (len(wanted) if ranges else offset + len(wanted))


@pytest.mark.parametrize(
    ("body", "content_range", "words"),
    [
        (OBJECT[3:5], "bytes 3-9/256", "ends 5 bytes early"),
        (OBJECT[:7], "bytes 0-6/256", r"asked for 7 bytes at 3, the server sent bytes 0-6/256"),
        (OBJECT[3:5], "bytes 3-4/256", "asked for 7 bytes at 3"),
        (OBJECT[:9], None, "ends 1 bytes early"),
    ],
)
def test_a_wrong_answer_may_pass(body: bytes, content_range: str | None, words: str) -> None:
    with pytest.raises(StorageError, match=words):
        read(body, content_range=content_range, offset=3, size=7)


@pytest.mark.parametrize(
    ("header", "total"),
    [
        ("bytes 0-99/2560", 2560),
        ("bytes */0", 0),
        (" bytes 5-5/6 ", 6),
        ("bytes 0-99/*", None),
        ("", None),
        ("items 0-1/2", None),
    ],
)
def test_content_range(header: str, total: int | None) -> None:
    assert total_bytes(header) == total


def test_range_header() -> None:
    assert range_header(5, 1) == "bytes=5-5"


def test_versions() -> None:
    noon = datetime(2026, 11, 2, 12, tzinfo=UTC)
    second = int(noon.timestamp()) * 10**9
    assert version_stat(1, None, "").mtime_ns == 0
    assert version_stat(1, noon, "").mtime_ns == second
    assert version_stat(1, noon, '"a"') == version_stat(1, noon.replace(microsecond=9), 'W/"a"')
    assert 0 < version_stat(1, noon, "a").mtime_ns - second < 10**9
    assert version_stat(1, noon, "a") != version_stat(1, noon, "b")
    assert 0 < version_stat(1, None, "a").mtime_ns < 2**62
