from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.killpoints import killed_at

from dataservice.errors import StorageError
from dataservice.storage.lazy.block_file import MAX_BLOCK_BYTES, BlockFile

BLOCKS = 40
PAYLOADS = {number: bytes([number]) * (10 + 37 * number) for number in range(BLOCKS)}


def written(path: Path, numbers: list[int]) -> list[int]:
    """Sizes of the file after each block."""
    file = BlockFile(str(path), BLOCKS)
    sizes = []
    for number in numbers:
        assert file.append(number, PAYLOADS[number])
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


def readable(path: Path) -> list[int]:
    """Numbers of the blocks that are there, all of them whole."""
    file = BlockFile(str(path), BLOCKS)
    found = {number: file.read(number) for number in file.kept().tolist()}
    file.close()
    assert all(data in (None, PAYLOADS[number]) for number, data in found.items())
    return [number for number, data in found.items() if data is not None]


def test_what_is_appended_is_there_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    assert readable(path) == []
    assert not path.exists()
    written(path, [7, 3, 39, 0])
    assert readable(path) == [0, 3, 7, 39]
    file = BlockFile(str(path), BLOCKS)
    assert not file.append(3, b"another")
    assert file.read(3) == PAYLOADS[3]
    assert file.has(np.array([3, 4, 0])).tolist() == [True, False, True]
    with pytest.raises(IndexError):
        file.append(BLOCKS, b"x")
    with pytest.raises(ValueError):
        file.append(5, bytes(MAX_BLOCK_BYTES + 1))
    file.close()
    file.close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000))
def test_a_torn_tail_costs_what_was_torn(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "blocks"
    numbers = [5, 1, 12, 8, 3]
    sizes = written(path, numbers)
    os.truncate(path, cut := min(cut, sizes[-1]))
    whole = sorted(number for number, size in zip(numbers, sizes, strict=True) if size <= cut)
    assert readable(path) == whole
    written(path, [30])
    assert readable(path) == [*whole, 30]
    written(path, sorted(set(numbers) - set(whole)))
    assert readable(path) == sorted([*numbers, 30])


@settings(max_examples=60, deadline=None)
@given(at=st.integers(33, 1500), value=st.integers(1, 255))
def test_damage_costs_the_block_it_hit(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("damage") / "blocks"
    numbers = [5, 1, 12, 8, 3]
    sizes = written(path, numbers)
    data = bytearray(path.read_bytes())
    at = min(at, len(data) - 1)
    data[at] ^= value
    path.write_bytes(data)
    hit = next(number for number, size in zip(numbers, sizes, strict=True) if at < size)
    assert readable(path) == sorted(set(numbers) - {hit})
    file = BlockFile(str(path), BLOCKS)
    file.read(hit)
    assert file.append(hit, PAYLOADS[hit])
    file.close()
    assert readable(path) == sorted(numbers)


def test_a_damaged_begin_costs_no_block(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    written(path, [3, 1, 4])
    with path.open("r+b") as file:
        file.write(b"gone")
    assert readable(path) == [1, 3, 4]
    file = BlockFile(str(path), BLOCKS)
    assert not file.append(3, PAYLOADS[3])
    assert file.append(5, PAYLOADS[5])
    file.close()
    assert readable(path) == [1, 3, 4, 5]


@pytest.mark.parametrize("content", [b"x", b"something else altogether, of another program"])
def test_what_holds_no_blocks_is_written_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(content)
    assert readable(path) == []
    file = BlockFile(str(path), BLOCKS)
    assert file.append(2, PAYLOADS[2])
    file.close()
    assert readable(path) == [2]


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    code = (
        "import sys; from dataservice.storage.lazy.block_file import BlockFile\n"
        f"file = BlockFile(sys.argv[1], {BLOCKS})\n"
        "print(sum(file.append(n, bytes([n]) * (10 + 37 * n)) for n in map(int, sys.argv[2:])))"
    )
    shares = [list(range(30)), list(range(39, 9, -1))]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), *map(str, share)], stdout=subprocess.PIPE
        )
        for share in shares
    ]
    kept = [int(process.communicate(timeout=60)[0]) for process in running]
    assert sum(kept) == BLOCKS
    assert readable(path) == list(range(BLOCKS))


def test_a_reader_sees_what_another_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    reader = BlockFile(str(path), BLOCKS)
    assert not reader.has(np.array([4])).any()
    written(path, [4])
    assert reader.has(np.array([4])).all()
    assert reader.read(4) == PAYLOADS[4]
    reader.close()


def test_killed_at_every_write(tmp_path: Path) -> None:
    """SIGKILL at each system call that writes, also in the middle of one."""
    for point in range(100):
        path = tmp_path / f"blocks-{point}"
        written(path, [1])
        done = tmp_path / f"done-{point}"

        def append_two(path: Path = path, done: Path = done) -> None:
            file = BlockFile(str(path), BLOCKS)
            for number in (2, 9):
                file.append(number, PAYLOADS[number])
                done.write_text(f"{number}")

        if not killed_at(point, append_two):
            break
        acknowledged = done.read_text() if done.exists() else ""
        found = readable(path)
        assert found[0] == 1
        assert 2 in found or acknowledged == ""
        written(path, [3])
        assert readable(path) == sorted([*found, 3])
    assert point >= 4


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blocks"
    written(path, [1, 2])
    before = path.read_bytes()
    file = BlockFile(str(path), BLOCKS)
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 20:
            return real(fd, data[:20], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        file.append(3, b"abc")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert file.append(3, PAYLOADS[3])
    file.close()
    assert readable(path) == [1, 2, 3]


def test_a_killed_writer_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    written(path, [1])
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "os.write(1, b'x'); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.read(1)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    written(path, [2])
    assert readable(path) == [1, 2]
