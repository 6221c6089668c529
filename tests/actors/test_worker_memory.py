"""A worker past its memory ends, says so, and lets nothing else in the process take part in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dataservice.actors.worker_memory import EXIT_CODE

START = "import logging; logging.basicConfig(); from dataservice.actors import worker_memory\n"
BOUND = 200 << 20


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + script], capture_output=True, text=True, timeout=60
    )


def test_resident_memory_grows_by_what_is_touched() -> None:
    done = run(
        "before = worker_memory.resident_bytes()\n"
        "held = b'\\xff' * (64 << 20)\n"
        "print((worker_memory.resident_bytes() - before) >> 20)\n"
    )
    assert 60 <= int(done.stdout) <= 80


def test_past_the_bound_it_ends_and_says_so() -> None:
    done = run(
        f"worker_memory.install({BOUND})\n"
        "import time\n"
        "held = []\n"
        "while True: held.append(b'\\xff' * (4 << 20)); time.sleep(0.001)\n"
    )
    assert done.returncode == EXIT_CODE
    assert "more than workers.memory_bytes of 200 MiB: it ends" in done.stderr


def test_within_the_bound_nothing_happens_whatever_is_reserved_or_mapped() -> None:
    done = run(
        f"worker_memory.install({BOUND})\n"
        "import mmap, tempfile, time\n"
        "reserved = mmap.mmap(-1, 800 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "with tempfile.TemporaryFile() as file:\n"
        "    for _ in range(300): file.write(bytes(1 << 20))\n"
        "    file.flush()\n"
        "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "    assert sum(mapped[::4096]) == 0\n"
        "    time.sleep(0.5)\n"
        "print('fine')\n"
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("size", ["1 << 40", "6 << 30"])
def test_what_comes_at_once_is_refused_by_the_kernel(size: str) -> None:
    done = run(
        f"worker_memory.install({BOUND})\n"
        f"try: held = bytearray({size})\n"
        "except MemoryError: print('refused')\n"
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_what_lies_free_between_blocks_in_use_does_not_count() -> None:
    size = 64 << 10  # of glibc's heap, not mapped for itself
    done = run(
        f"worker_memory.install({BOUND})\n"
        "import time\n"
        f"blocks = [bytearray({size}) for _ in range(2500)]\n"
        "kept = blocks[::4]\n"
        "del blocks\n"
        f"more = [bytearray({4 * size}) for _ in range(450)]\n"
        "time.sleep(0.5)\n"
        "print('fine')\n"
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
