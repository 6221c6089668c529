"""Staging to a node's own disk: what trainers wait, how fast shards are copied, what is kept.

python benchmarks/storage_staging.py [--quick]

wait      a reader with eight threads fills batches ahead of a trainer that takes one every
          40 ms, from a store with 10 ms a call and some calls of 5 s; read directly, beside a
          stager that starts at the same time, and after `dataservice stage`
copy      the stager's copy of a shard beside `cp`, fsync and the CRC of the same file, in turns
hits      order of need of a real plan, four of 32 lanes on a node, at budgets below what the
          node reads: what is kept with LRU, by next use with the same copies at misses, and by
          the stager's own decisions ahead of need
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from figures import Figure
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from dataservice.core.packspec import ShardRef
from dataservice.core.plan import Plan
from dataservice.core.settings import Kind, PlanSettings, SourceShare
from dataservice.core.tables import SampleColumns, SourceStats
from dataservice.storage.backends import LocalBackend, ObjectStat
from dataservice.storage.objects import ShardReader, Store, staged_name
from dataservice.storage.staging import Copiers, Need, StagingArea, decide

MIB = 1 << 20

# ---- wait ----------------------------------------------------------------------------------------

LATENCY_S = 0.010
STALL_FIRST, STALL_EVERY = 20, 250
"""Calls: the 20th stalls and then every 250th, whoever makes them."""
STEP_S = 0.040
READS_A_STEP = 16
READ_BYTES = 30_000
AHEAD_STEPS = 4


class SlowBackend(LocalBackend):
    """Local files behind a latency; some calls stall."""

    def __init__(self, stall_s: float) -> None:
        super().__init__()
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self.calls = self.stalls = 0

    def stat(self, url: str) -> ObjectStat:
        self._wait()
        return super().stat(url)

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        self._wait()
        return super().read(url, offset, size)

    def _wait(self) -> None:
        with self._lock:
            self.calls += 1
            stalls = self.calls % STALL_EVERY == STALL_FIRST
            self.stalls += stalls
        time.sleep(self._stall_s if stalls else LATENCY_S)


def _needs(folder: Path, count: int, size: int) -> list[Need]:
    folder.mkdir()
    needs = []
    for number in range(count):
        path = folder / f"{number}.zip"
        with open(path, "wb") as file:
            for part in range(0, size, 16 * MIB):
                file.write(random.Random(number + part).randbytes(min(16 * MIB, size - part)))
        stat = path.stat()
        shard = ShardRef(
            source="s",
            name=path.name,
            url=str(path),
            size_bytes=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
        )
        needs.append(Need(shard=shard, crc32=-1, next_use=number))
    return needs


def _train(reader: ShardReader, shards: Sequence[ShardRef], steps: int) -> tuple[float, float]:
    """Seconds that a trainer waits in all, and the longest wait; shards are read one by one."""
    rng = random.Random(7)

    def batch(step: int) -> list[tuple[ShardRef, int]]:
        shard = shards[step * len(shards) // steps]
        places = range(READS_A_STEP)
        return [(shard, rng.randrange(shard.size_bytes - READ_BYTES)) for _ in places]

    waited = longest = 0.0
    with ThreadPoolExecutor(8) as pool:
        ready: deque[list[Future[bytes]]] = deque()
        asked = 0
        for _ in range(steps):
            while asked < steps and len(ready) < AHEAD_STEPS:
                reads = batch(asked)
                ready.append([pool.submit(reader.read, s, at, READ_BYTES) for s, at in reads])
                asked += 1
            before = time.monotonic()
            for future in ready.popleft():
                future.result()
            wait = time.monotonic() - before
            waited, longest = waited + wait, max(longest, wait)
            time.sleep(STEP_S)
    return waited, longest


def measure_wait(quick: bool) -> Iterator[Figure]:
    steps, stall_s = (50, 1.0) if quick else (150, 5.0)
    found: dict[str, float] = {}
    for way in ("directly", "beside a stager", "after dataservice stage"):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            needs = _needs(folder / "origin", 8, 16 * MIB)
            cache = str(folder / "cache")
            slow = SlowBackend(stall_s)
            store = Store(local=slow, threads=48)
            stack.callback(store.close)
            reader = stack.enter_context(ShardReader(None, deadline_s=60, store=store))
            if way != "directly":
                reader.cache_dir = cache
                area = StagingArea(cache, budget_bytes=1 << 40, store=store, deadline_s=60)
                stack.enter_context(area)
                stack.enter_context(Copiers(area))
                area.update(needs)
                while way.startswith("after") and not area.settled(3):
                    area.wait(0.1)
            waited, longest = _train(reader, [need.shard for need in needs], steps)
            found[way] = waited
            calls = f"{slow.calls:,} calls to the store, {slow.stalls} of them of {stall_s:g} s"
            target = "" if way == "directly" else "a quarter of the wait of direct reads"
            yield Figure(
                name=f"trainer waits, reading {way}",
                value=waited,
                unit="s",
                target=target,
                reached=None if way == "directly" else waited <= found["directly"] / 4,
                note=f"{steps} steps of {STEP_S * 1000:g} ms, longest {longest:.2f} s; {calls}",
            )


# ---- copy ----------------------------------------------------------------------------------------


def _by_cp(source: Path, target: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    found = 0
    while data := os.read(fd, 4 * MIB):
        found = crc32(data, found)
    os.close(fd)
    return time.perf_counter() - begin


def _by_stager(need: Need, cache: Path) -> float:
    with StagingArea(str(cache), budget_bytes=1 << 40) as area:
        area.update([need])
        begin = time.perf_counter()
        area.step()
        seconds = time.perf_counter() - begin
        assert area.figures().copied_shards == 1, area.figures().last_error
    return seconds


def measure_copy(quick: bool) -> Iterator[Figure]:
    size = (64 if quick else 512) * MIB
    ratios, rates = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        need = _needs(folder / "origin", 1, size)[0]
        _by_cp(Path(need.shard.url), folder / "copy")
        for _ in range(5):
            os.sync()
            by_cp = _by_cp(Path(need.shard.url), folder / "copy")
            (folder / "copy").unlink()
            os.sync()
            by_stager = _by_stager(need, folder / "cache")
            shutil.rmtree(folder / "cache")
            ratios.append(by_cp / by_stager)
            rates.append(size / by_stager / 1e6)
    pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    yield Figure(
        name="copy, speed against cp + fsync + CRC",
        value=statistics.median(ratios),
        unit="x",
        target="at least 0.8",
        reached=statistics.median(ratios) >= 0.8,
        note=f"{size // MIB} MiB from the page cache, five pairs in turns: {pairs}; median "
        f"{statistics.median(rates):,.0f} MB/s",
    )


# ---- hits ----------------------------------------------------------------------------------------

LANES = (0, 9, 17, 30)
NEAR, KNOWN = 3, 64


class PlainIndex:
    """Samples that all have 1,400 tokens; the order of need depends on nothing else."""

    fingerprint = "plain"

    def __init__(self, num_samples: int, num_shards: int) -> None:
        sizes = tuple(np.diff(np.arange(num_shards + 1) * num_samples // num_shards).tolist())
        self.first_rows = np.cumsum([0, *sizes])
        self.sources = (
            SourceStats(
                name="all",
                shard_names=tuple(f"{i}.jsonl" for i in range(num_shards)),
                shard_samples=sizes,
                shard_text_samples=sizes,
                fingerprint="plain",
            ),
        )

    def columns(self, source: int | NDArray[np.int64], rows: NDArray[np.int64]) -> SampleColumns:
        none = np.zeros(0, dtype=np.int64)
        tokens = np.full(len(rows), 1400, dtype=np.int64)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        return SampleColumns(
            text_tokens=tokens, loss_tokens=tokens, image_offsets=offsets, width=none, height=none
        )

    def rows_of_kind(
        self, source: int | NDArray[np.int64], kind: Kind, numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return numbers


def _turns(index: PlainIndex, plan: Plan, count: int) -> list[Counter[int]]:
    """By window: samples that the node's lanes read of each shard."""
    turns = []
    for window in range(count):
        read: Counter[int] = Counter()
        for lane in LANES:
            _, rows = plan.samples(lane, window)
            shards = np.searchsorted(index.first_rows, rows, side="right") - 1
            read.update(shards.tolist())
        turns.append(read)
    return turns


def _shard(number: int) -> ShardRef:
    return ShardRef(source="all", name="", url=str(number), size_bytes=1, mtime_ns=0)


def _lru(turns: Sequence[Counter[int]], budget: int) -> tuple[float, int]:
    """(share of samples read from copies, copies); every miss is copied."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = copies = 0
    for read in turns:
        for shard, samples in read.items():
            if shard in held:
                held.move_to_end(shard)
                hits += samples
                continue
            copies += 1
            held[shard] = None
            if len(held) > budget:
                held.popitem(last=False)
    return hits / sum(read.total() for read in turns), copies


def _next_use(turns: Sequence[Counter[int]], budget: int) -> tuple[float, int]:
    """The same copies at misses, but dropped by next use."""
    later: dict[int, deque[int]] = {}
    for turn, read in enumerate(turns):
        for shard in read:
            later.setdefault(shard, deque()).append(turn)
    refs = {shard: _shard(shard) for shard in later}
    number = {staged_name(ref): shard for shard, ref in refs.items()}
    held: dict[str, int] = {}
    hits = copies = 0
    for read in turns:
        for shard, samples in read.items():
            later[shard].popleft()
            if staged_name(refs[shard]) in held:
                hits += samples
                continue
            needs = [Need(shard=refs[shard], crc32=-1, next_use=-1)]
            for name in held:
                other = number[name]
                if later[other]:
                    use = later[other][0]
                    needs.append(Need(shard=refs[other], crc32=-1, next_use=use, copy=False))
            for name in decide(needs, held, budget).evict[: len(held) + 1 - budget]:
                del held[name]
            held[staged_name(refs[shard])] = 1
            copies += 1
    return hits / sum(read.total() for read in turns), copies


def _served(turns: Sequence[Counter[int]], budget: int, per_shard: float) -> tuple[float, int]:
    """The stager's way: decided once a window, ahead of need, with what the plan then knows."""
    refs = {shard: _shard(shard) for read in turns for shard in read}
    held: dict[str, int] = {}
    hits = copies = 0
    for turn, read in enumerate(turns):
        known = turns[turn : turn + KNOWN]
        soon: Counter[int] = Counter()
        for near in known[:NEAR]:
            soon.update(near)
        first: dict[int, int] = {}
        for ahead, later in enumerate(known):
            for shard in later:
                first.setdefault(shard, ahead)
        needs = [
            Need(
                shard=refs[shard],
                crc32=-1,
                next_use=ahead,
                copy=ahead < NEAR,
                share=min(1.0, soon[shard] / per_shard),
            )
            for shard, ahead in first.items()
        ]
        decision = decide(needs, held, budget)
        for name in decision.evict[: max(0, len(held) + len(decision.copy) - budget)]:
            del held[name]
        held |= {staged_name(need.shard): 1 for need in decision.copy}
        assert len(held) <= budget
        copies += len(decision.copy)
        hits += sum(n for shard, n in read.items() if staged_name(refs[shard]) in held)
    return hits / sum(read.total() for read in turns), copies


def measure_hits(quick: bool) -> Iterator[Figure]:
    num_samples, num_shards, windows = 20_000_000, 20_000, 40 if quick else 120
    index = PlainIndex(num_samples, num_shards)
    settings = PlanSettings(sources=(SourceShare(name="all", weight="1"),), epochs=None)
    plan = Plan(settings, index)
    turns = _turns(index, plan, windows)
    shards = set().union(*turns)
    read = sum(turn.total() for turn in turns)
    per_shard = num_samples / num_shards
    for word, part in (("half", 2), ("a quarter", 4), ("a tenth", 10)):
        budget = len(shards) // part
        ways = {
            "LRU": _lru(turns, budget),
            "next use": _next_use(turns, budget),
            "the stager": _served(turns, budget, per_shard),
        }
        for way, (hits, copies) in ways.items():
            ahead = "ahead of need" if way == "the stager" else "at each miss"
            yield Figure(
                name=f"hit rate at {word} of what is read, {way}",
                value=hits,
                unit="",
                target="" if way == "LRU" else "above LRU",
                reached=None if way == "LRU" else hits > ways["LRU"][0],
                note=f"copied {ahead}, {copies * per_shard / read:.1f} bytes copied a byte read; "
                f"{len(shards):,} shards of {per_shard:,.0f} samples, {windows} windows, "
                f"{plan.num_lanes} lanes, 4 of them here",
            )


def measured(quick: bool) -> Iterator[Figure]:
    yield from measure_wait(quick)
    yield from measure_copy(quick)
    yield from measure_hits(quick)


def run(quick: bool) -> list[Figure]:
    return list(measured(quick))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--quick", action="store_true", help="Less data, seconds in place of minutes."
    )
    for figure in measured(parser.parse_args().quick):
        reached = {None: "", True: "reached", False: "NOT REACHED"}[figure.reached]
        print(
            f"{figure.name:58} {figure.value:10.3f} {figure.unit:4} {reached:12} {figure.note}",
            flush=True,
        )


if __name__ == "__main__":
    main()
