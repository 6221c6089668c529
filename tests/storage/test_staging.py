from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError
from dataservice.storage import staging
from dataservice.storage.objects import ShardReader, Store, staged_name, staged_path
from dataservice.storage.staging import CopyStopped, Need, StagingArea, copy_shard, decide, scan

# ---- decide


def need(name: str, size: int, next_use: int) -> Need:
    shard = ShardRef(source="s", name=name, url=f"/{name}", size_bytes=size, mtime_ns=1)
    return Need(shard=shard, crc32=-1, next_use=next_use)


def cached_of(*needs: Need) -> dict[str, int]:
    return {staged_name(n.shard): n.shard.size_bytes for n in needs}


def names(needs: tuple[Need, ...]) -> list[str]:
    return [n.shard.name for n in needs]


def test_copies_come_in_the_order_of_need_until_one_does_not_fit() -> None:
    needs = [need("c", 4, 3), need("a", 4, 1), need("b", 4, 2), need("small", 1, 4)]
    decision = decide(needs, {}, 9)
    assert names(decision.copy) == ["a", "b"]
    assert (decision.evict, decision.too_large) == ((), ())


def test_unneeded_copies_go_first_then_those_needed_last() -> None:
    soon, late, latest, old = need("a", 4, 1), need("b", 4, 5), need("c", 4, 9), need("old", 4, 0)
    decision = decide([soon, late, latest], cached_of(late, latest, old), 8)
    assert names(decision.copy) == ["a"]
    assert list(decision.evict) == [staged_name(old.shard), staged_name(latest.shard)]


def test_unneeded_copies_stay_while_there_is_room() -> None:
    old = need("old", 4, 0)
    decision = decide([need("a", 4, 1)], cached_of(old), 8)
    assert names(decision.copy) == ["a"] and decision.evict == ()


def test_nothing_needed_sooner_is_dropped_for_something_later() -> None:
    soon, late = need("a", 6, 1), need("b", 6, 2)
    decision = decide([soon, late], cached_of(soon), 8)
    assert (decision.copy, decision.evict) == ((), ())


def test_a_shard_above_the_budget_is_never_staged_and_blocks_nobody() -> None:
    large, small = need("large", 20, 1), need("small", 3, 2)
    decision = decide([large, small], {}, 10)
    assert (names(decision.copy), names(decision.too_large)) == (["small"], ["large"])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=9),
    st.sets(st.integers(0, 12)),
    st.integers(0, 30),
)
def test_decisions_hold_their_promises(
    drawn: list[tuple[int, int]], held: set[int], budget: int
) -> None:
    size = {number: 1 + number * 5 % 7 for number in range(13)}
    needs = [need(str(number), size[number], use) for number, use in drawn]
    first_use: dict[str, int] = {}
    for one in sorted(needs, key=lambda n: n.next_use):
        first_use.setdefault(staged_name(one.shard), one.next_use)
    cached = cached_of(*(need(str(number), size[number], 0) for number in held))
    decision = decide(needs, cached, budget)
    copies = {staged_name(n.shard): n.shard.size_bytes for n in decision.copy}
    assert not copies.keys() & cached.keys() and set(decision.evict) <= cached.keys()
    after = {n: s for n, s in {**cached, **copies}.items() if n not in decision.evict}
    assert sum(after.values()) <= budget
    last_copied = max((first_use[name] for name in copies), default=-1)
    for name in decision.evict:
        if cached[name] <= budget:
            assert name not in first_use or first_use[name] >= last_copied
    assert [n.next_use for n in decision.copy] == sorted(n.next_use for n in decision.copy)


# ---- copying


CONTENT = bytes(range(251)) * 400


class Origin:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def make(self, name: str, size: int = len(CONTENT), next_use: int = 0) -> Need:
        path = self.folder / name
        path.write_bytes(CONTENT[:size])
        stat = path.stat()
        shard = ShardRef(
            source="s",
            name=name,
            url=str(path),
            size_bytes=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
        )
        return Need(shard=shard, crc32=zlib.crc32(CONTENT[:size]), next_use=next_use)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(attempts=1)
    yield made
    made.close()


def copy(store: Store, wanted: Need, cache: Path, **options: object) -> str:
    return copy_shard(store, wanted.shard, wanted.crc32, str(cache), deadline_s=10, **options)


def test_a_copy_is_complete_under_its_name(store: Store, origin: Origin, cache: Path) -> None:
    wanted = origin.make("a.zip")
    path = copy(store, wanted, cache)
    assert path == staged_path(str(cache), wanted.shard)
    assert Path(path).read_bytes() == CONTENT
    assert scan(str(cache)) == {staged_name(wanted.shard): len(CONTENT)}
    with ShardReader(str(cache), deadline_s=10) as reader:
        Path(wanted.shard.url).unlink()
        assert reader.read(wanted.shard, 7, 9) == CONTENT[7:16]


def test_scan_removes_what_a_crash_left_and_nothing_else(cache: Path, origin: Origin) -> None:
    name = staged_name(origin.make("a.zip").shard)
    (cache / f".tmp-77-{name}").write_bytes(b"half")
    (cache / name).write_bytes(b"whole")
    for foreign in ("notes.txt", ".tmp-of-a-person", "0123-x"):
        (cache / foreign).write_bytes(b"x")
    assert scan(str(cache)) == {name: 5}
    assert sorted(os.listdir(cache)) == sorted([name, "notes.txt", ".tmp-of-a-person", "0123-x"])


def corrupt_copy(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], None]
) -> Callable[[str, ShardRef, int], None]:
    real = staging._verify_copy

    def verify(path: str, shard: ShardRef, expected: int) -> None:
        damage(path)
        real(path, shard, expected)

    monkeypatch.setattr(staging, "_verify_copy", verify)
    return verify


def test_a_copy_that_reads_back_wrong_is_not_used(
    store: Store, origin: Origin, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(path: str) -> None:
        with open(path, "r+b") as file:
            file.write(b"\xff")

    corrupt_copy(monkeypatch, flip)
    with pytest.raises(StorageError, match="is the disk failing"):
        copy(store, origin.make("a.zip"), cache)
    assert os.listdir(cache) == []


def test_a_changed_origin_is_refused(store: Store, origin: Origin, cache: Path) -> None:
    wanted = origin.make("a.zip")
    stat = os.stat(wanted.shard.url)
    Path(wanted.shard.url).write_bytes(CONTENT[::-1])
    with pytest.raises(StaleIndexError, match=r"shard s/a\.zip changed"):
        copy(store, wanted, cache)
    os.utime(wanted.shard.url, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(StaleIndexError, match="has CRC"):
        copy(store, wanted, cache)
    Path(wanted.shard.url).unlink()
    with pytest.raises(StorageError, match=r"a\.zip"):
        copy(store, wanted, cache)
    assert os.listdir(cache) == []


def test_a_copy_can_be_stopped(store: Store, origin: Origin, cache: Path) -> None:
    with pytest.raises(CopyStopped):
        copy(store, origin.make("a.zip"), cache, stopped=lambda: True)
    assert os.listdir(cache) == []


# ---- StagingArea


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def area(cache: Path, store: Store, clock: Clock) -> Iterator[StagingArea]:
    with StagingArea(str(cache), budget_bytes=250, store=store, clock=clock) as made:
        yield made


def run(area: StagingArea) -> int:
    steps = 0
    while area.step():
        steps += 1
        assert area.cached_bytes <= area.budget_bytes
        assert steps < 100
    return steps


def test_an_area_follows_the_needs_within_its_budget(area: StagingArea, origin: Origin) -> None:
    a, b, c = (origin.make(n, 100, next_use=i) for i, n in enumerate("abc"))
    area.update([c, b, a])
    assert run(area) == 2
    assert set(area._cached) == {staged_name(a.shard), staged_name(b.shard)}
    assert (area.cached_shards, area.cached_bytes, area.copied_bytes) == (2, 200, 200)
    area.update([b, c])
    assert run(area) == 2
    assert set(scan(area.cache_dir)) == {staged_name(b.shard), staged_name(c.shard)}
    assert (area.evictions, area.copied_bytes, area.errors) == (1, 300, 0)
    assert all(Path(one.shard.url).exists() for one in (a, b, c))
    assert not area.step()


def test_copies_of_an_earlier_run_are_kept_and_a_smaller_budget_obeyed(
    area: StagingArea, origin: Origin, store: Store
) -> None:
    a, b = origin.make("a", 100, next_use=1), origin.make("b", 100, next_use=2)
    area.update([a, b])
    run(area)
    area.close()
    with StagingArea(area.cache_dir, budget_bytes=150, store=store) as again:
        assert again.cached_bytes == 200
        again.update([a, b])
        assert again.step()
        assert set(again._cached) == {staged_name(a.shard)}
        assert not again.step() and again.copied_bytes == 0


def test_a_folder_has_one_owner(area: StagingArea, cache: Path, store: Store) -> None:
    with pytest.raises(BlockingIOError, match="belongs to another running stager"):
        StagingArea(str(cache), budget_bytes=1, store=store)
    StagingArea(str(cache / "other"), budget_bytes=1).close()
    area.close()
    StagingArea(str(cache), budget_bytes=1, store=store).close()


def test_a_shard_above_the_budget_is_warned_of_once(
    area: StagingArea, origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    area.update([origin.make("large", 251), origin.make("small", 10)])
    assert run(area) == 1
    assert not area.step()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "shard s/large has 251 bytes, more than the budget" in warnings[0]


def test_a_full_disk_is_reported_and_passes(
    area: StagingArea, origin: Origin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    area.update([origin.make("a", 100)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert area.step()
    assert (area.errors, area.cached_bytes) == (1, 0)
    assert "is full" in area.last_error
    assert os.listdir(area.cache_dir) == [".lock"]
    assert not area.step()
    clock.now += 0.6
    assert run(area) == 1
    assert area.cached_bytes == 100


def test_one_bad_shard_does_not_hold_up_the_others(
    area: StagingArea, origin: Origin, clock: Clock
) -> None:
    bad, good = origin.make("bad", 100, next_use=1), origin.make("good", 100, next_use=2)
    Path(bad.shard.url).unlink()
    area.update([bad, good])
    assert run(area) == 2
    assert (area.errors, set(area._cached)) == (1, {staged_name(good.shard)})
    pauses = []
    for _ in range(9):
        before = clock.now
        while not area.step():
            clock.now += 0.5
        pauses.append(clock.now - before)
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == 60.0


def test_stop_gives_up_a_copy(area: StagingArea, origin: Origin) -> None:
    area.stop()
    area.update([origin.make("a", 100)])
    assert area.step()
    assert (area.errors, area.cached_shards) == (0, 0)
    assert os.listdir(area.cache_dir) == [".lock"]
