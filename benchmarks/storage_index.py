"""Figures of the index: how fast it is built, how large it is, how soon an archive is open.

    python -m benchmarks.storage_index [--quick]

Times are of one core: CPU seconds of the measuring process, so that what else the machine does
counts little; of whole builds the median of five, else the best of some runs. Files are in the page
cache.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.figures import Figure
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.archives import Archive, Archives
from dataservice.storage.archives.lookup import Lookup
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import InThisProcess
from dataservice.storage.index_rows import RowReader
from dataservice.storage.jsonl import Line
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import Store
from dataservice.storage.recordfiles import RecordScan
from dataservice.storage.records import RecordReader
from dataservice.storage.sources import SourceFiles

COUNTER = functools.partial(TextRenderer.build, TextSettings(tokenizer="bytes"))
WORDS = "the of and a to in is you that it he was for on are as with his they at".split()
FORMATS = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))
DEADLINE_S = 60.0


def run(quick: bool) -> list[Figure]:
    count = 20_000 if quick else 100_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = write_archive(folder / "images.zip", count)
        figures = [
            *text_figures(folder, count),
            *image_figures(folder, names),
            *probe_figures(folder, names),
            *opening_figures(folder),
            *serving_figures(folder),
        ]
        if not quick:
            figures += memory_figures(folder)
    return figures


# ---- data


def write_archive(path: Path, count: int) -> list[str]:
    """Stored JPEG, PNG and WebP pictures of about 10 kB, by turns; their names."""
    rng = np.random.default_rng(1)
    pictures = []
    for number in range(60):
        noise = rng.integers(0, 255, (45 + number, 60, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((240 + number, 180), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, FORMATS[number % 3][0], quality=60)
        pictures.append(file.getvalue())
    names = [
        f"{number // 1000:05d}/{number * 7919 % 10**9:09d}.{FORMATS[number % 3][1]}"
        for number in range(count)
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, pictures[number % 60])
    return names


def write_text(path: Path, count: int) -> None:
    choose = random.Random(2)
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(choose.choices(WORDS, k=250))}) + "\n")


def write_chats(path: Path, names: Sequence[str], *, sized: bool) -> None:
    """LLaVA records of two turns, an image each; shuffled, as mixtures are."""
    choose = random.Random(3)
    shuffled = choose.sample(names, len(names))
    with open(path, "w") as file:
        for number, name in enumerate(shuffled):
            text = " ".join(choose.choices(WORDS, k=190))
            record = {
                "id": f"{number:09d}",
                "image": name,
                "conversations": [
                    {"from": "human", "value": "<image>\n" + text[:120]},
                    {"from": "gpt", "value": text[120:]},
                ],
            }
            if sized:
                record |= {"width": 240, "height": 180}
            file.write(json.dumps(record) + "\n")


def source_of(path: Path, *images: Path) -> SourceFiles:
    return SourceFiles(name="s", records=(str(path),), images=tuple(map(str, images)))


# ---- building


def built(source: SourceFiles, index_dir: Path, runs: int = 5) -> float:
    """CPU seconds of a build from nothing, the median of some; the last one stays."""
    seconds = []
    for _ in range(runs):
        for path in index_dir.glob("*"):
            path.unlink()
        began = time.process_time()
        report = build_index([source], str(index_dir), counter=COUNTER, executor=InThisProcess())
        seconds.append(time.process_time() - began)
        assert report.num_rejected == 0, report.examples
    return statistics.median(seconds)


def speed(
    what: str, path: Path, count: int, seconds: float, *, headers: bool = False
) -> list[Figure]:
    """`headers`: whether pictures were read, which has a target of its own."""
    size = path.stat().st_size
    lines_s, megabytes_s = count / seconds, size / seconds / 1e6
    reached = None if headers else lines_s >= 100_000 or megabytes_s >= 100
    note = f"mean line {size / count:.0f} bytes, byte tokenizer"
    target = "" if headers else "100 MB/s or 100 k lines/s a core"
    return [
        Figure(name=f"{what}: lines", value=lines_s, unit="lines/s", target=target,
               reached=reached, note=note),
        Figure(name=f"{what}: bytes", value=megabytes_s, unit="MB/s", target=target,
               reached=reached, note=note),
    ]  # fmt: skip


def index_bytes(index_dir: Path) -> int:
    return sum(path.stat().st_size for path in index_dir.iterdir())


def text_figures(folder: Path, count: int) -> list[Figure]:
    path = folder / "text.jsonl"
    write_text(path, count)
    index_dir = folder / "text-index"
    seconds = built(source_of(path), index_dir)
    return [
        *speed("index of text", path, count, seconds),
        Figure(
            name="index of text: on disk",
            value=index_bytes(index_dir) / count,
            unit="bytes/sample",
            target="< 64",
            reached=index_bytes(index_dir) < 64 * count,
        ),
        *loop_figures("text", path, ()),
    ]


def image_figures(folder: Path, names: Sequence[str]) -> list[Figure]:
    count, archive = len(names), folder / "images.zip"
    figures = []
    for what, sized in (("with sizes", True), ("without sizes", False)):
        path = folder / f"chats-{what.split()[0]}.jsonl"
        write_chats(path, names, sized=sized)
        index_dir = folder / f"index-{what.split()[0]}"
        seconds = built(source_of(path, archive), index_dir)
        figures += speed(
            f"index of records with an image, {what}", path, count, seconds, headers=not sized
        )
    size = index_bytes(index_dir)
    figures.append(
        Figure(
            name="index of records with an image: on disk",
            value=size / count,
            unit="bytes/sample and image",
            target="< 64 + 32",
            reached=size < (64 + 32) * count,
            note=_parts(index_dir, count),
        )
    )
    return [*figures, *loop_figures("an image", folder / "chats-with.jsonl", (archive,))]


def _parts(index_dir: Path, count: int) -> str:
    parts: dict[str, int] = {}
    for path in index_dir.glob("*.arrow"):
        parts[path.name.split(".")[1]] = path.stat().st_size
    return ", ".join(f"{name} {size / count:.1f}" for name, size in sorted(parts.items()))


def loop_figures(what: str, path: Path, images: Sequence[Path]) -> list[Figure]:
    """What a record costs besides being parsed, counted, and its image looked up."""
    with opened(path, images) as (files, archives, roots, store):
        finder = archives.finder(files, (), roots)
        batches = list(_batches(store, path, 20_000))
        count = sum(map(len, batches))
        reader, counter = RecordReader(files.format), COUNTER()
        rows = RowReader(files, counter, finder)
        names = [[n for line in b for n in reader.read(line.data or b"").images] for b in batches]

        def parse_and_count() -> None:
            for batch in batches:
                for line in batch:
                    assert line.data is not None
                    counter.count(reader.read(line.data))

        def look_up() -> None:
            for some in names:
                finder.places(some)

        def whole() -> None:
            for batch in batches:
                rows.read(batch)

        bare = best_of(5, parse_and_count) / count * 1e6
        looking = best_of(5, look_up) / count * 1e6 if images else 0.0
        loop = best_of(5, whole) / count * 1e6 - bare - looking
    return [
        Figure(
            name=f"loop around parsing, counting and looking up, {what} a record",
            value=loop,
            unit="us/line",
            target="<= 3",
            reached=loop <= 3,
            note=f"parsing and counting {bare:.2f}, looking up {looking:.2f}",
        )
    ]


def _batches(store: Store, path: Path, count: int) -> Iterator[list[Line]]:
    scan = RecordScan(store, str(path), path.stat().st_size, deadline_s=DEADLINE_S)
    for batch in scan.batches(256):
        yield batch
        count -= len(batch)
        if count <= 0:
            return


# ---- archives


class CountingBackend(LocalBackend):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        self.sizes.append(size)
        return super().read(url, offset, size)


class opened:  # noqa: N801
    """A source's files, archives and store, closed at the end of the block."""

    def __init__(
        self, path: Path, images: Sequence[Path], backend: LocalBackend | None = None
    ) -> None:
        self._store = Store(local=backend)
        self._archives = Archives(self._store, None, deadline_s=DEADLINE_S)
        roots = [found(self._store, image) for image in images]
        self._all = source_of(path, *images), self._archives, roots, self._store

    def __enter__(self) -> tuple[SourceFiles, Archives, list[FoundFile], Store]:
        return self._all

    def __exit__(self, *exc: object) -> None:
        self._archives.close()
        self._store.close()


def found(store: Store, path: Path) -> FoundFile:
    return FoundFile(url=str(path), stat=store.stat(str(path), deadline_s=DEADLINE_S))


def probe_figures(folder: Path, names: Sequence[str]) -> list[Figure]:
    backend = CountingBackend()
    archive = folder / "images.zip"
    seconds = []
    with opened(archive, (archive,), backend) as (files, _, roots, store):
        for _ in range(3):
            fresh = Archives(store, None, deadline_s=DEADLINE_S)
            finder = fresh.finder(files, (), roots)
            places = finder.places(names)
            backend.sizes.clear()
            began = time.process_time()
            sizes = [finder.sizes(places[at : at + 256]) for at in range(0, len(places), 256)]
            seconds.append(time.process_time() - began)
            assert all(isinstance(size, tuple) for some in sizes for size in some)
            fresh.close()
    read = np.array(backend.sizes)
    rate = len(names) / min(seconds)
    per_image = read.sum() / len(names)
    return [
        Figure(
            name="header probing from a local zip",
            value=rate,
            unit="images/s",
            target=">= 30,000 a core",
            reached=rate >= 30_000,
            note="JPEG, PNG and WebP by turns",
        ),
        Figure(
            name="header probing: bytes read",
            value=per_image,
            unit="bytes/image",
            target="<= 8 KiB",
            reached=bool(per_image <= 8192),
            note=f"{len(read) / len(names):.2f} reads an image, largest {read.max()} bytes",
        ),
    ]


def opening_figures(folder: Path) -> list[Figure]:
    path, index_dir = folder / "images.zip", folder / "open-index"
    index_dir.mkdir()
    store = Store()
    file = found(store, path)
    name = Archive(file, store, str(index_dir), deadline_s=DEADLINE_S).name(12_345)

    def ours() -> None:
        archive = Archive(file, store, str(index_dir), deadline_s=DEADLINE_S)
        assert Lookup.of([archive]).find([name])[1].tolist() == [12_345]

    def by_zipfile() -> None:
        with zipfile.ZipFile(path) as archive:
            archive.getinfo(name)

    own, other = best_of(5, ours) * 1e3, best_of(5, by_zipfile) * 1e3
    members = len(zipfile.ZipFile(path).infolist())
    store.close()
    return [
        Figure(
            name=f"open a zip of {members:,} members from the index, first name looked up",
            value=own,
            unit="ms",
            target="< 50 at 100,000 members",
            reached=own < 50 * members / 100_000,
            note=f"zipfile {other:.0f} ms: {other / own:.0f} times as long",
        )
    ]


# ---- serving and memory


def serving_figures(folder: Path) -> list[Figure]:
    """Reading the whole index in a process of its own: what of it is that process's memory."""
    code = (
        "import sys, numpy as np\n"
        "from dataservice.storage.index import Index\n"
        "def own():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(text.split('RssAnon:')[1].split()[0]) * 1024\n"
        "index = Index.open(sys.argv[1])\n"
        "(stats,) = index.sources\n"
        "rows = np.arange(sum(stats.shard_samples))\n"
        "index.columns(0, rows[:256])\n"
        "before = own()\n"
        "for at in range(0, len(rows), 256): index.columns(0, rows[at:at + 256])\n"
        "print(own() - before)\n"
    )
    index_dir = folder / "index-without"
    done = subprocess.run(
        [sys.executable, "-c", code, str(index_dir)], capture_output=True, text=True, check=True
    )
    size = index_bytes(index_dir)
    grown = int(done.stdout)
    return [
        Figure(
            name="own memory of a process that has read the whole index",
            value=grown / 1e6,
            unit="MB",
            target="no copy: less than the index",
            reached=grown < max(size / 2, 1_000_000),
            note=f"the index has {size / 1e6:.1f} MB, mapped",
        )
    ]


def memory_figures(folder: Path) -> list[Figure]:
    """Ten million tiny samples, indexed in a process of its own."""
    path = folder / "tiny.jsonl"
    with open(path, "w") as file:
        for start in range(0, 10_000_000, 100_000):
            file.write("".join(f'{{"text": "{n}"}}\n' for n in range(start, start + 100_000)))
    done = subprocess.run(
        [sys.executable, __file__, "--build", str(path), str(folder / "tiny-index")],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, seconds = json.loads(done.stdout)
    size = index_bytes(folder / "tiny-index")
    return [
        Figure(
            name="most own memory while ten million tiny samples are indexed",
            value=peak / 1e6,
            unit="MB",
            target="< 400",
            reached=peak < 400e6,
            note=f"{1e7 / seconds:,.0f} lines/s, {size / 1e7:.1f} bytes/sample on disk",
        )
    ]


def build_and_print_memory(path: str, index_dir: str) -> None:
    os.makedirs(index_dir)
    began = time.process_time()
    most = [0]

    stop = threading.Event()
    watch = threading.Thread(target=lambda: watch_memory(most, stop))
    watch.start()
    build_index([source_of(Path(path))], index_dir, counter=COUNTER, executor=InThisProcess())
    seconds = time.process_time() - began
    stop.set()
    watch.join()
    assert sum(Index.open(index_dir).sources[0].shard_samples) == 10_000_000
    print(json.dumps([most[0], seconds]))


def watch_memory(most: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        most[0] = max(most[0], own_bytes())


def own_bytes() -> int:
    """Memory of this process that is no mapped file."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def best_of(runs: int, call: Callable[[], None]) -> float:
    """CPU seconds."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--build", nargs=2, metavar=("FILE", "INDEX"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        build_and_print_memory(*given.build)
    else:
        for figure in run(given.quick):
            mark = {True: "reached", False: "MISSED", None: ""}[figure.reached]
            print(f"{figure.name}: {figure.value:,.2f} {figure.unit} "
                  f"[{figure.target}: {mark}] {figure.note}")  # fmt: skip
