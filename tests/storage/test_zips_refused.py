from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import contents, directory
from support.zipbuilder import (
    BZIP2,
    DEFLATE64,
    DEFLATED,
    LZMA,
    WIDE,
    ZSTD,
    Part,
    build,
    pack,
)

from dataservice.errors import ArchiveError
from dataservice.storage import membertable as mt
from dataservice.storage.membertable import MAX_MEMBER_BYTES, MAX_RATIO
from dataservice.storage.zips import directory as directory_module

PICTURE = bytes(range(256)) * 40
GOOD = Part(name=b"good", data=PICTURE)
MIB = 1024 * 1024
UNIX = 3 << 8


def refusal(part: Part) -> str:
    """Why it is refused; what is around it stays usable."""
    first = Part(name=b"first", data=b"first")
    found = contents(build([first, part, GOOD]))
    assert found["first"] == b"first" and found["good"] == PICTURE
    reason = found[part.name.decode()]
    assert isinstance(reason, str)
    return reason


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(data=PICTURE, flags=1), "encrypted"),
        (Part(data=PICTURE, flags=0x41), "encrypted"),
        (Part(data=PICTURE, flags=0x2000), "encrypted"),
        (Part(data=PICTURE, method=99), "encrypted"),
        (Part(data=PICTURE, local_flags=1), "encrypted"),
        (Part(data=PICTURE, disk=1), "another disk of a split archive"),
        (Part(data=PICTURE, local_signature=b"PK\x01\x02"), "wrong offset: no local header"),
        (Part(data=PICTURE, local_method=8), "local header says method 8, not 0"),
        (Part(data=PICTURE, crc32=1), "CRC mismatch"),
        (Part(data=PICTURE, method=DEFLATED, crc32=1), "CRC mismatch"),
        (Part(data=PICTURE, size=len(PICTURE) - 1), "size mismatch"),
        (Part(data=PICTURE, size=len(PICTURE) + 1), "size mismatch"),
        (Part(data=PICTURE, method=DEFLATED, stored=b"\xff" * 100), "cannot be inflated"),
        (Part(data=PICTURE, size=MAX_MEMBER_BYTES + 1), "over the size limit of a member"),
        (Part(data=PICTURE, method=DEFLATED, size=WIDE - 1), "over the size limit of a member"),
        (Part(data=PICTURE, method=DEFLATED, size=30 * MIB), f"over {MAX_RATIO} times"),
        (Part(data=b"x", method=DEFLATED, stored=bytes(70_000)), "size mismatch"),
        (Part(data=PICTURE, offset=1 << 31), "entry in the central directory is damaged"),
        (Part(data=PICTURE, method=8, stored_size=1 << 31), "size limit"),
        (Part(name=b"n" * 1025, data=PICTURE), "over 1024 bytes long"),
        (Part(data=b"../x", made_by=UNIX, external=0o120777 << 16), "link or a device"),
        (Part(data=b"", made_by=UNIX, external=0o020666 << 16), "link or a device"),
    ],
)
def test_members_that_fail_alone(part: Part, reason: str) -> None:
    if part.name.startswith(b"n"):
        found = contents(build([part, GOOD]))
        assert found == {"n" * 100: "the member's name is over 1024 bytes long", "good": PICTURE}
    else:
        assert reason in refusal(part)


def test_a_regular_file_of_unix_and_a_mode_of_another_system() -> None:
    parts = [
        Part(name=b"a", data=b"1", made_by=UNIX, external=0o100644 << 16),
        Part(name=b"b", data=b"2", made_by=0, external=0o120777 << 16),
    ]
    assert contents(build(parts)) == {"a": b"1", "b": b"2"}


# ---- members that share bytes


def test_members_at_one_place() -> None:
    parts = [
        Part(name=b"a", data=PICTURE),
        Part(name=b"b", data=PICTURE, offset=0),
        Part(name=b"c", data=b"apart"),
    ]
    found = contents(build(parts))
    assert found["c"] == b"apart"
    assert "overlaps another one" in str(found["a"]) and "overlaps" in str(found["b"])


def test_a_member_that_reaches_into_others_takes_one_with_it() -> None:
    parts = [
        Part(name=b"a", data=b"a" * 100),
        Part(name=b"b", data=b"b" * 100, size=400, stored_size=400),
        *[Part(name=name, data=name * 100) for name in (b"c", b"d", b"e")],
    ]
    found = contents(build(parts))
    assert found["a"] == b"a" * 100 and found["d"] == b"d" * 100 and found["e"] == b"e" * 100
    assert "overlaps" in str(found["b"]) and "overlaps" in str(found["c"])


def test_a_bomb_of_overlapping_members_reads_nothing() -> None:
    """Every member's data is the local headers of all that follow, and one kernel (Fifield)."""
    kernel = pack(DEFLATED, bytes(5 * MIB))
    parts, content = [], b""
    for number in range(100):
        parts.append(Part(name=f"{number}".encode(), method=DEFLATED, data=b"", stored=b""))
    shell = build(parts)
    start = shell.index(b"PK\x01\x02")
    entries = bytearray(shell[start : shell.rindex(b"PK\x05\x06")])
    content = shell[:start] + kernel
    at = 0
    while at < len(entries):
        offset = struct.unpack_from("<L", entries, at + 42)[0]
        sizes = len(content) - offset - 31, 5 * MIB
        struct.pack_into("<2L", entries, at + 20, *sizes)
        at += 46 + struct.unpack_from("<H", entries, at + 28)[0]
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 100, 100, len(entries), len(content), 0)
    table = directory(content + entries + tail)
    assert len(table) == 100 and np.all(table.problem != mt.OK)


def test_a_bad_entry_behind_the_directory_takes_no_other_with_it() -> None:
    parts = [
        Part(name=b"a", data=b"a" * 100, stored_size=10_000, size=10_000),
        Part(name=b"b", data=b"b" * 100),
    ]
    assert contents(build(parts))["b"] == b"b" * 100


@settings(deadline=None, max_examples=100)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.booleans()), max_size=12)
)
def test_no_two_accepted_members_share_a_byte(spans: list[tuple[int, int, bool]]) -> None:
    start = np.array([s for s, _, _ in spans], np.uint64)
    stop = start + np.array([n for _, n, _ in spans], np.uint64)
    problem = np.zeros(len(spans), np.uint8)
    considered = np.array([c for _, _, c in spans], np.bool_)
    mt.refuse_overlaps(problem, start, stop, considered)
    good = np.flatnonzero(considered & (problem == mt.OK)).tolist()
    for i in good:
        for j in good:
            assert i == j or stop[i] <= start[j] or stop[j] <= start[i]
    for i in np.flatnonzero(problem).tolist():  # and none is refused that touches no other
        assert any(i != j and considered[j] and start[i] < stop[j] and start[j] < stop[i]
                   for j in range(len(spans)))  # fmt: skip


# ---- archives that are refused as a whole

WHOLE = build([GOOD, Part(name=b"b", data=PICTURE, method=DEFLATED)])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a zip archive"),
        (b"no zip at all", "not a zip archive"),
        (b"PK\x07\x08" + PICTURE, "truncated, or a part of a split archive"),
        (WHOLE[:-30], "truncated, or a part of a split archive"),
        (WHOLE[: len(WHOLE) // 2], "truncated"),
        (WHOLE[500:], "truncated or damaged"),
        (build([GOOD], disks=(1, 1)), "split archive; join its parts"),
        (build([GOOD], disks=(0, 1)), "split archive"),
        (build([GOOD], zip64=True, disks=(1, 1)), "split archive"),
        (build([GOOD], count=2), "1 entries in the central directory, the end record says 2"),
        (build([GOOD, GOOD], count=1), "2 entries in the central directory"),
        (build([GOOD], directory_size=20), "not where it should be"),
        (build([GOOD], directory_size=49, directory_offset=len(WHOLE)), "not where it should be"),
        (build([GOOD], zip64=True, count=mt.MAX_MEMBERS + 1), "over the limit of an archive"),
        (build([GOOD], zip64=True, count=1 << 63), "over the limit of an archive"),
        (build([GOOD, GOOD]).replace(b"PK\x01\x02", b"PK\x01\x09", 1), "not where it should be"),
        (build([GOOD, Part(name=b"b\x00", data=b"")]).replace(b"PK\x01\x02", b"KP\x01\x02", 2)
         .replace(b"KP\x01\x02", b"PK\x01\x02", 1), "no entry behind an entry"),
    ],
)  # fmt: skip
def test_archives_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ArchiveError, match=reason):
        directory(data)


def test_a_cut_archive_that_holds_a_whole_one() -> None:
    inner = build([Part(name=b"inner", data=b"x")])
    outer = build([Part(name=b"a.zip", data=inner), GOOD])
    assert contents(outer)["a.zip"] == inner
    with pytest.raises(ArchiveError, match="truncated"):
        directory(outer[: len(outer) - 40])


def test_an_end_record_in_the_comment_of_the_archive() -> None:
    other = build([Part(name=b"other", data=b"other")])
    end = other[other.rindex(b"PK\x05\x06") :]
    for comment in (end, end + b"behind", b"before" + end, end * 3):
        data = build([GOOD])[:-2] + struct.pack("<H", len(comment)) + comment
        assert contents(data) == {"good": PICTURE}
    with pytest.raises(ArchiveError, match="central directory is not where it should be"):
        contents(build([GOOD]) + end)


def test_offsets_of_32_bits_in_a_larger_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    small = build([GOOD])
    hole = 1 << 32

    def read(offset: int, size: int) -> bytes:
        assert offset >= hole
        return small[offset - hole : offset - hole + size]

    monkeypatch.setattr(directory_module, "_TAIL_BYTES", len(small))
    with pytest.raises(ArchiveError, match="over 4 GiB, but its offsets have 32 bits"):
        directory_module.read_directory(read, hole + len(small))


def test_too_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build([Part(name=f"{i}".encode()) for i in range(20)])
    assert len(directory(data)) == 20
    monkeypatch.setattr(mt, "MAX_MEMBERS", 19)
    with pytest.raises(ArchiveError, match="20 members, over the limit of an archive"):
        directory(data)


# ---- anything at all


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1 << 64)),
        min_size=1,
        max_size=4,
    ),
    zip64=st.booleans(),
    cut=st.integers(0, 40),
    near_end=st.booleans(),
)
def test_damage_is_refused_or_harmless(
    changes: list[tuple[int, int, int]], zip64: bool, cut: int, near_end: bool
) -> None:
    """Whatever is written anywhere: a reason, or the bytes that the CRC vouches for."""
    parts = [
        Part(name=b"a.png", data=b"some bytes" * 5),
        Part(name=b"dir/b.txt", data=b"words " * 30, method=DEFLATED, descriptor=True),
        Part(name=b"c", data=b"more" * 9, method=DEFLATE64, extra=b"\1\0\2\0ab"),
        Part(name="\u00e9".encode(), data=b"z" * 40, method=ZSTD, comment=b"note"),
    ]
    expected = {part.name.decode(): part.data for part in parts}
    data = bytearray(build(parts, zip64=zip64))
    for at, size, value in changes:
        at %= min(150, len(data)) if near_end else len(data)
        place = len(data) - 1 - at if near_end else at
        data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    damaged = bytes(data[: len(data) - (cut if cut < 10 else 0)])
    try:
        found = contents(damaged)
    except ArchiveError:
        return
    for value in found.values():
        if isinstance(value, bytes) and value not in expected.values():
            assert value in damaged  # stored as it is, with a CRC that was written with it


# ---- memory


def peak_bytes(path: Path) -> int:
    """Reads all members of an archive in a process of its own; its peak memory beyond imports."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.archives import contents
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
data = open({str(path)!r}, 'rb').read()
contents(data)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def bombs() -> dict[str, bytes]:
    zeros = bytes(100 * MIB)
    return {
        "deflate": build([Part(data=zeros, method=DEFLATED)]),
        "deflate-lies": build([Part(data=zeros, method=DEFLATED, size=1000)]),
        "deflate64-lies": build([Part(data=zeros, method=DEFLATE64, size=1000)]),
        "bzip2-lies": build([Part(data=zeros, method=BZIP2, size=1000)]),
        "lzma-lies": build([Part(data=zeros, method=LZMA, size=1000)]),
        "zstd-lies": build([Part(data=zeros, method=ZSTD, size=1000)]),
        "stored-lies": build([Part(data=b"x", stored_size=100 * MIB, size=100 * MIB)]),
    }


def test_bombs_cost_little_memory(tmp_path: Path) -> None:
    for name, data in bombs().items():
        path = tmp_path / name
        path.write_bytes(data)
        assert peak_bytes(path) < len(data) * 3 + 48 * MIB, name
        (value,) = contents(data).values()
        assert isinstance(value, str), name


# ---- files from elsewhere


def expectations() -> list[dict[str, object]]:
    folder = os.environ.get("DATASERVICE_EVIL")
    if folder is None:
        return []
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    return [entry for entry in manifest["files"] if entry["file"].endswith(".zip")]


@pytest.mark.skipif(
    "DATASERVICE_EVIL" not in os.environ, reason="DATASERVICE_EVIL names no folder of hostile files"
)
@pytest.mark.parametrize("entry", expectations(), ids=lambda entry: entry["file"])
def test_hostile_files(entry: dict[str, object]) -> None:
    data = Path(os.environ["DATASERVICE_EVIL"], str(entry["file"])).read_bytes()
    expect: dict[str, object] = entry["expect"]  # type: ignore[assignment]
    if expect["outcome"] == "reject":
        with pytest.raises(ArchiveError) as caught:
            directory(data)
        words = str(expect["reason_says"]).split(" or ")
        assert any(word in str(caught.value) for word in words)
        return
    found = contents(data)
    readable: dict[str, dict[str, object]] = expect.get("readable", {})  # type: ignore[assignment]
    for name, content in readable.items():
        value = found[name]
        assert isinstance(value, bytes) and len(value) == content["bytes"]
        assert hashlib.sha256(value).hexdigest() == content["sha256"]
    unreadable: dict[str, str] = expect.get("unreadable", {})  # type: ignore[assignment]
    for name in unreadable:
        for member in found if name == "every member" else [name]:
            assert isinstance(found[member], str)
    if "candidates" in expect:
        (value,) = found.values()
        assert isinstance(value, bytes)
        assert hashlib.sha256(value).hexdigest() == expect["candidates"]["last"]  # type: ignore[index]
