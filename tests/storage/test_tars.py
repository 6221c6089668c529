from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import Source, names

from dataservice.errors import ArchiveError
from dataservice.storage import membertable as mt
from dataservice.storage import tars
from dataservice.storage.membertable import MAX_MEMBER_BYTES, MemberTable

PICTURE = bytes(range(256)) * 5
BLOCK = 512


def info(name: str, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def make_tar(members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def read(data: bytes) -> MemberTable:
    return tars.read_members(Source(data), len(data))


def contents(data: bytes) -> dict[str, bytes | str]:
    table = read(data)
    found: dict[str, bytes | str] = {}
    for row, name in enumerate(names(table)):
        at, size = table.offset[row].item(), table.stored_bytes[row].item()
        found[name] = table.reason(row) or data[at : at + size]
    return found


FORMATS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
LONG = "a/long/folder/name" * 5 + "/" + "b" * 90 + ".jpg"


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: int) -> None:
    expected = {"a.png": PICTURE, LONG: b"long", "images/b.jpg": b"", "c": b"x" * BLOCK}
    data = make_tar([(info(name), content) for name, content in expected.items()], form)
    assert contents(data) == expected
    table = read(data)
    assert set(table.method.tolist()) == {mt.AS_IT_IS}
    assert table.size_bytes.tolist() == table.stored_bytes.tolist()


@pytest.mark.parametrize("form", FORMATS[:2])
def test_names_beyond_ascii_and_very_long_ones(form: int) -> None:
    expected = {"\u4e2d/\u00e9.png": b"1", "d/" * 400 + "x": b"2"}
    assert contents(make_tar([(info(n), c) for n, c in expected.items()], form)) == expected


def test_what_is_not_a_file_is_refused_and_folders_are_left_out() -> None:
    kinds = {
        "symbolic": tarfile.SYMTYPE,
        "hard": tarfile.LNKTYPE,
        "fifo": tarfile.FIFOTYPE,
        "block": tarfile.BLKTYPE,
        "char": tarfile.CHRTYPE,
    }
    members = [(info(name, type=kind, linkname="good"), b"") for name, kind in kinds.items()]
    members += [(info("folder", type=tarfile.DIRTYPE), b""), (info("good"), PICTURE)]
    found = contents(make_tar(members))
    assert found.pop("good") == PICTURE
    assert found == dict.fromkeys(kinds, "the member is a link or a device, not a file")


def test_a_hard_link_that_states_a_size_has_no_data() -> None:
    data = bytearray(make_tar([(info("link", type=tarfile.LNKTYPE), b""), (info("good"), b"x")]))
    header = bytearray(data[:BLOCK])
    header[124:136] = b"00000001000\0"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    assert contents(bytes(header) + bytes(data[BLOCK:]))["good"] == b"x"


@pytest.mark.parametrize("pax", [{"GNU.sparse.major": "1"}, {"GNU.sparse.map": "0,1"}])
def test_sparse_files(pax: dict[str, str]) -> None:
    found = contents(make_tar([(info("s", pax_headers=pax), b"x"), (info("good"), PICTURE)]))
    assert found == {"s": "the member is a sparse file", "good": PICTURE}


def test_old_headers_large_numbers_and_global_settings() -> None:
    old = info("old.png").tobuf(tarfile.USTAR_FORMAT)
    old = bytearray(old)
    old[257:265] = bytes(8)
    old[124:136] = b"\x80" + (5).to_bytes(11, "big")
    old[148:156] = b"        "
    old[148:156] = b"%06o\0 " % sum(old)
    data = bytes(old) + b"bytes".ljust(BLOCK, b"\0")
    assert contents(data + bytes(1024)) == {"old.png": b"bytes"}
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}
    ) as archive:
        archive.addfile(info("a", size=1), io.BytesIO(b"1"))
    assert contents(file.getvalue()) == {"a": b"1"}


def test_the_last_member_of_a_name_counts_and_hostile_names_do_not() -> None:
    members = [(info("a"), b"1"), (info("../up"), b"2"), (info("/abs"), b"3"), (info("a"), b"4")]
    table = read(make_tar(members))
    assert table.problem.tolist() == [mt.SHADOWED, mt.UNSAFE_NAME, mt.UNSAFE_NAME, mt.OK]
    long = contents(make_tar([(info("n" * 1025), b"1"), (info("b"), b"2")]))
    assert long == {"n" * 100: "the member's name is over 1024 bytes long", "b": b"2"}


def test_headers_only_are_read_when_members_are_large() -> None:
    large = bytes(1024 * 1024)
    data = make_tar([(info(f"{i}"), large) for i in range(20)])
    source = Source(data)
    tars.read_members(source, len(data))
    assert source.read_bytes < 200 * 1024
    small = make_tar([(info(f"{i}"), b"x") for i in range(2000)])
    source = Source(small)
    assert len(tars.read_members(source, len(small))) == 2000
    assert len(source.reads) < 10


def test_a_size_over_the_limit_and_beyond_the_archive() -> None:
    member = info("huge")
    member.size = MAX_MEMBER_BYTES + 1
    data = member.tobuf(tarfile.GNU_FORMAT) + b"x" * BLOCK
    assert contents(data) == {"huge": "the archive is truncated within the member"}

    def read_hole(offset: int, size: int) -> bytes:
        return data[offset : offset + size].ljust(size, b"\0")

    table = tars.read_members(read_hole, BLOCK + MAX_MEMBER_BYTES + 4096)
    assert table.problem.tolist() == [mt.TOO_LARGE]


def test_a_cut_archive_keeps_what_stands_before_the_cut() -> None:
    data = make_tar([(info("a"), PICTURE), (info("b"), PICTURE), (info("c"), PICTURE)])
    step = BLOCK + 3 * BLOCK
    for cut in range(1, len(data), 100):
        if cut < BLOCK:
            with pytest.raises(ArchiveError, match="truncated, or not a tar"):
                read(data[:cut])
            continue
        found = contents(data[:cut])
        for number, name in enumerate(("a", "b", "c")):
            if cut >= number * step + BLOCK + len(PICTURE):
                assert found[name] == PICTURE
            elif cut >= number * step + BLOCK:
                assert found[name] == "the archive is truncated within the member"
            else:
                assert name not in found


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated, or not a tar"),
        (b"\x1f\x8b" + bytes(1000), "compressed by gzip; unpack the tar first"),
        (b"\x28\xb5\x2f\xfd" + bytes(1000), "compressed by Zstandard"),
        (b"BZh9" + bytes(1000), "compressed by bzip2"),
        (b"\xfd7zXZ\0" + bytes(1000), "compressed by xz"),
        (b"\x1f\x8b" + bytes(100), "compressed by gzip"),
        (b"no tar at all" * 100, "not a tar archive"),
        (make_tar([(info("a"), b"1")])[:1024] + b"x" * 1024, "no valid header at 1024"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ArchiveError, match=reason):
        read(data)


def test_which_archive_it_is() -> None:
    one = read(make_tar([(info("a"), b"1"), (info("b"), b"2")]))
    same = read(make_tar([(info("a"), b"1"), (info("b"), b"3")]))
    other = read(make_tar([(info("a"), b"1"), (info("c"), b"2")]))
    assert one.directory_crc32 == same.directory_crc32 != other.directory_crc32


@settings(deadline=None, max_examples=200)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12))),
    cut=st.integers(0, 3000),
    form=st.sampled_from(FORMATS[:2]),
    fix=st.booleans(),
)
def test_damage_is_refused_or_stays_within_the_archive(
    changes: list[tuple[int, bytes]], cut: int, form: int, fix: bool
) -> None:
    members = [(info("a"), b"1" * 600), (info(LONG), b"2"), (info("s", type=b"2"), b"")]
    data = bytearray(make_tar(members, form)[: 5 * BLOCK])
    for at, value in changes:
        at %= len(data)
        data[at : at + len(value)] = value[: len(data) - at]
    if fix:  # so that the damage is not found by the checksum
        for at in range(0, len(data), BLOCK):
            data[at + 148 : at + 156] = b"        "
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])
    damaged = bytes(data[: max(len(data) - cut, 0)])
    try:
        table = read(damaged)
    except ArchiveError:
        return
    good = table.problem == mt.OK
    assert (table.offset[good] + table.size_bytes[good] <= len(damaged)).all()
