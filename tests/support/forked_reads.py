"""Reads random images of archives in forked processes with threads, and checks each."""

from __future__ import annotations

import os
import random
import tarfile
import threading
import time
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.storage import tars, zips
from dataservice.storage.members import read_image
from dataservice.storage.membertable import MemberTable
from dataservice.storage.objects import ShardReader
from support.archives import names
from support.zipbuilder import BZIP2, DEFLATE64, DEFLATED, LZMA, STORED, ZSTD, Part, build


def shard_of(path: Path) -> ShardRef:
    stat = path.stat()
    return ShardRef(
        source="s",
        name=path.name,
        url=str(path),
        size_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
    )


def image_spec(table: MemberTable, row: int, *, shard: int = 0) -> ImageSpec:
    fields = ("offset", "stored_bytes", "size_bytes", "method", "crc32")
    return ImageSpec(
        shard=shard,
        member=names(table)[row],
        width=1,
        height=1,
        target_width=1,
        target_height=1,
        **{name: getattr(table, name)[row].item() for name in fields},
    )


@dataclass(frozen=True)
class Image:
    shard: ShardRef
    spec: ImageSpec
    crc32: int


def make_images(folder: Path) -> list[Image]:
    """Two zips with every method and one tar, each with 60 members of up to 40 KB."""
    rng = random.Random(4)
    found: list[Image] = []
    for number in range(3):
        contents = {
            f"{number}/{i}.bin": rng.randbytes(rng.randrange(20_000)) * 2 for i in range(60)
        }
        path = folder / f"{number}.{'tar' if number == 2 else 'zip'}"
        if number == 2:
            with tarfile.open(path, "w") as archive:
                for name, data in contents.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
        else:
            methods = [STORED, DEFLATED, DEFLATE64, BZIP2, LZMA, ZSTD]
            parts = [
                Part(name=name.encode(), data=data, method=methods[i % len(methods)])
                for i, (name, data) in enumerate(contents.items())
            ]
            path.write_bytes(build(parts))
        data = path.read_bytes()
        read_table = tars.read_members if number == 2 else zips.read_directory
        table = read_table(lambda at, size, data=data: data[at : at + size], len(data))
        found += [
            Image(shard_of(path), image_spec(table, row), zlib.crc32(contents[name]))
            for row, name in enumerate(names(table))
        ]
    return found


def read_in_threads(
    reader: ShardReader, images: list[Image], *, threads: int, seconds: float, seed: int
) -> int:
    """How many were read; AssertionError for one that came out wrong."""
    ends = time.monotonic() + seconds
    counts, wrong = [0] * threads, []

    def run(number: int) -> None:
        rng = random.Random(1000 * seed + number)
        while time.monotonic() < ends:
            image = rng.choice(images)
            try:
                good = zlib.crc32(read_image(reader.read, image.spec, image.shard)) == image.crc32
            except Exception as error:
                good = False
                wrong.append(repr(error))
            if not good:
                wrong.append(image.spec.member)
                return
            counts[number] += 1

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(seconds + 30)
        assert not worker.is_alive()
    assert not wrong, wrong
    return sum(counts)


def read_after_fork(
    reader: ShardReader, images: list[Image], *, processes: int, threads: int, seconds: float
) -> list[int]:
    """Images read by each child; all children fork while the parent reads in threads as well."""
    stop = threading.Event()
    busy = [
        threading.Thread(target=_read_until, args=(reader, images, stop, n)) for n in range(threads)
    ]
    for thread in busy:
        thread.start()
    children = []
    for number in range(processes):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            count = -1
            try:
                count = read_in_threads(
                    reader, images, threads=threads, seconds=seconds, seed=number
                )
            finally:
                os.write(send, str(count).encode())
                os._exit(0)
        os.close(send)
        children.append((child, receive))
    stop.set()
    for thread in busy:
        thread.join(30)
    counts = []
    for child, receive in children:
        os.waitpid(child, 0)
        counts.append(int(os.read(receive, 32) or b"-1"))
        os.close(receive)
    return counts


def _read_until(reader: ShardReader, images: list[Image], stop: threading.Event, seed: int) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        image = rng.choice(images)
        assert zlib.crc32(read_image(reader.read, image.spec, image.shard)) == image.crc32
