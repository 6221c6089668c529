from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage.staging.origins import CONTENT, Clock, CountingStore, HangingStore, Origin, run

from dataservice.storage.objects import ShardReader, staged_name, staged_path
from dataservice.storage.staging import CacheFolder, Copiers, Need, StagingArea


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def area(cache: Path, clock: Clock) -> Iterator[StagingArea]:
    with StagingArea(str(cache), budget_bytes=250, clock=clock, part_of_pause=lambda: 1.0) as made:
        yield made


def copies(area: StagingArea) -> set[str]:
    return {name for name in os.listdir(area.cache_dir) if not name.startswith(".")}


def names(*needs: Need) -> set[str]:
    return {staged_name(need.shard) for need in needs}


def test_an_area_follows_the_needs_within_its_budget(area: StagingArea, origin: Origin) -> None:
    a, b, c = (origin.make(n, 100, next_use=i) for i, n in enumerate("abc"))
    area.update([c, b, a])
    assert run(area) == 2
    assert copies(area) == names(a, b)
    figures = area.figures()
    assert (figures.cached_shards, figures.cached_bytes, figures.copied_bytes) == (2, 200, 200)
    assert (figures.missing_shards, figures.read_through_shards) == (0, 1)
    assert figures.read_through_bytes == 100
    area.update([b, c])
    assert run(area) == 1
    assert copies(area) == names(b, c)
    figures = area.figures()
    assert (figures.evictions, figures.copied_shards, figures.errors) == (1, 3, 0)
    assert figures.read_through_shards == 0
    assert all(Path(one.shard.url).exists() for one in (a, b, c))
    assert not area.step()


def test_nothing_is_copied_before_the_start(cache: Path, origin: Origin, clock: Clock) -> None:
    with StagingArea(str(cache), budget_bytes=250, clock=clock, start_after_s=0.7) as late:
        late.update([origin.make("a", 100)])
        assert not late.step() and late.figures().missing_shards == 0
        clock.now = 0.69
        late.update([origin.make("a", 100)])
        assert not late.step()
        clock.now = 0.7
        assert run(late) == 1


def test_pauses_differ_from_node_to_node(cache: Path, origin: Origin, clock: Clock) -> None:
    """So that an origin that failed for all of them is not asked by all of them at once."""
    need = origin.make("a", 100)
    Path(need.shard.url).unlink()
    times = set()
    for node in range(8):
        clock.now = 0.0
        with StagingArea(str(cache / f"{node}"), budget_bytes=250, clock=clock) as area:
            area.update([need])
            for _ in range(6):
                while not area.step():
                    clock.now += 0.5
            times.add(clock.now)
    assert len(times) > 3 and 7.0 <= min(times) and max(times) <= 18.0


def test_a_copy_is_read_in_place_of_its_original(area: StagingArea, origin: Origin) -> None:
    need = origin.make("a.zip", 200)
    area.update([need])
    run(area)
    with ShardReader(area.cache_dir, deadline_s=10) as reader:
        Path(need.shard.url).unlink()
        assert reader.read(need.shard, 7, 9) == CONTENT[7:16]


def test_copies_of_an_earlier_run_are_kept_and_a_smaller_budget_obeyed(
    area: StagingArea, origin: Origin
) -> None:
    a, b = origin.make("a", 100, next_use=1), origin.make("b", 100, next_use=2)
    area.update([a, b])
    run(area)
    area.close()
    with StagingArea(area.cache_dir, budget_bytes=150) as again:
        assert again.figures().cached_bytes == 200
        again.update([a, b])
        assert again.step()
        assert copies(again) == names(a)
        assert not again.step() and again.figures().copied_bytes == 0


def test_a_damaged_copy_that_a_reader_removed_is_made_again(
    area: StagingArea, origin: Origin
) -> None:
    need = origin.make("a", 100)
    area.update([need])
    run(area)
    Path(staged_path(area.cache_dir, need.shard)).unlink()
    area.update([need])
    assert run(area) == 1
    assert copies(area) == names(need)


def test_a_shard_above_the_budget_is_warned_of_once(
    area: StagingArea, origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    area.update([origin.make("large", 251), origin.make("small", 10)])
    assert run(area) == 1
    assert not area.step()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "shard s/large has 251 bytes, more than the budget" in warnings[0]
    assert "(250)" in warnings[0] and "read from its origin" in warnings[0]
    assert area.figures().read_through_bytes == 251


def test_a_start_removes_what_a_crash_left_and_nothing_else(cache: Path, origin: Origin) -> None:
    name = staged_name(origin.make("a.zip").shard)
    cache.mkdir()
    (cache / f".tmp-{name}").write_bytes(b"half")
    (cache / name).write_bytes(b"whole")
    (cache / ".jobs-1").mkdir()
    (cache / ".jobs-1" / "77-00000000").write_bytes(b'{"budget')
    for foreign in ("notes.txt", ".tmp-of-a-person", "0123-x"):
        (cache / foreign).write_bytes(b"x")
    with StagingArea(str(cache), budget_bytes=100) as area:
        assert area.figures().cached_bytes == 5
        area.step()
        assert not (cache / f".tmp-{name}").exists()
        assert len(os.listdir(cache / ".jobs-1")) == 1
    left = {name, "notes.txt", ".tmp-of-a-person", "0123-x", ".jobs-1", ".lock"}
    assert set(os.listdir(cache)) == left and os.listdir(cache / ".jobs-1") == []


# ---- full disks ----------------------------------------------------------------------------------


class SmallDisk(CacheFolder):
    """A disk whose free bytes are what the test says."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.free = 10**9

    def free_bytes(self) -> int:
        return self.free


def test_a_disk_with_less_room_than_the_budget_is_read_through(
    cache: Path, origin: Origin, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    disk = SmallDisk(str(cache))
    a, b, c = (origin.make(n, 100, next_use=i) for i, n in enumerate("abc"))
    with StagingArea(str(cache), budget_bytes=250, folder=disk, clock=clock) as area:
        area.update([b, c])
        run(area)
        disk.free = 60
        area.update([a, b, c])
        assert run(area) == 1
        assert copies(area) == names(a, b)
        figures = area.figures()
        assert (figures.read_through_shards, figures.disk_full, figures.errors) == (1, 0, 0)
        disk.free = 0
        area.update([a, b, origin.make("d", 240, next_use=0)])
        assert not run(area)
        figures = area.figures()
        assert (figures.read_through_bytes, figures.disk_full, figures.errors) == (240, 1, 0)
    text = caplog.text
    assert "has room for 200 bytes of copies, the budget is 250" in text and "1 shards" in text


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_turns_out_full_is_reported_and_passes(
    area: StagingArea,
    origin: Origin,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: int,
) -> None:
    area.step()

    def full(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    need = origin.make("a", 100)
    area.update([need])
    real_pwrite = os.pwrite

    def full_for_copies(fd: int, data: bytes, offset: int) -> int:
        if len(data) == 100:
            raise OSError(error, os.strerror(error))
        return real_pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_for_copies if call == "pwrite" else full)
        area.step()
    figures = area.figures()
    assert (figures.errors, figures.cached_bytes, figures.disk_full) == (1, 0, 1)
    assert "the disk of" in figures.last_error and "is full" in figures.last_error
    assert copies(area) == set()
    assert set(os.listdir(area.cache_dir)) == {".lock", ".jobs-1"}
    assert not area.step()
    assert area.figures().read_through_shards == 1
    clock.now += 1.1
    assert run(area) == 1
    assert area.figures().cached_bytes == 100


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk(tiny_disk: Path, origin: Origin) -> None:
    needs = [origin.make(f"{i}.zip", 1 << 20, next_use=i) for i in range(6)]
    stranger = tiny_disk / "stranger"
    with StagingArea(str(tiny_disk / "cache"), budget_bytes=1 << 30) as area:
        area.update(needs)
        run(area)
        assert names(*needs[:3]) <= copies(area) <= names(*needs)
        assert area.figures().read_through_shards >= 2
        stranger.write_bytes(bytes(os.statvfs(tiny_disk).f_bavail * 4096))
        area.update([needs[5]])
        run(area)
        assert names(needs[5]) <= copies(area)
        assert area.figures().evictions >= 1
    for need in needs:
        path = Path(staged_path(str(tiny_disk / "cache"), need.shard))
        if path.exists():
            assert path.read_bytes() == Path(need.shard.url).read_bytes()


# ---- failing and hanging origins -----------------------------------------------------------------


def test_one_bad_shard_does_not_hold_up_the_others(
    area: StagingArea, origin: Origin, clock: Clock
) -> None:
    bad, good = origin.make("bad", 100, next_use=1), origin.make("good", 100, next_use=2)
    Path(bad.shard.url).unlink()
    area.update([bad, good])
    run(area)
    assert area.figures().errors == 1 and copies(area) == names(good)
    pauses = []
    for _ in range(9):
        before = clock.now
        while not area.step():
            clock.now += 0.5
        pauses.append(clock.now - before)
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == 60.0


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_store_that_hangs_for_one_shard_stalls_that_shard_alone(
    cache: Path, origin: Origin
) -> None:
    needs = [origin.make(f"{i}", 100, next_use=i) for i in range(6)]
    store = HangingStore("0", "3")
    with (
        StagingArea(str(cache), budget_bytes=10**6, store=store, deadline_s=0.3) as area,
        Copiers(area),
    ):
        area.update(needs)
        wait_until(lambda: area.figures().copied_shards == 4 and area.figures().errors >= 2)
        figures = area.figures()
        assert figures.stalls >= 4 and figures.missing_shards == 2
        assert "no answer within 0.3 s" in figures.last_error
        assert copies(area) == names(*(needs[i] for i in (1, 2, 4, 5)))
    store.close()


def test_stop_gives_up_a_copy_that_hangs(cache: Path, origin: Origin) -> None:
    store = HangingStore("a")
    with StagingArea(str(cache), budget_bytes=10**6, store=store, deadline_s=2) as area:
        area.update([origin.make("a", 100)])
        with Copiers(area):
            wait_until(lambda: area.figures().cached_bytes == 100)
            before = time.monotonic()
        assert time.monotonic() - before < 1.5
        assert (area.figures().errors, area.figures().cached_bytes) == (0, 0)
    assert set(os.listdir(cache)) == {".lock", ".jobs-1"}
    store.close()


def test_small_shards_are_copied_side_by_side_large_ones_in_order(
    cache: Path, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataservice.storage.staging import area as area_module
    from dataservice.storage.staging import copying, ranges

    for module in (area_module, copying, ranges):
        monkeypatch.setattr(module, "RANGE_BYTES", 1000)
    together: list[set[str]] = []
    reading: set[str] = set()
    lock = threading.Lock()

    def before(url: str) -> None:
        name = Path(url).name
        with lock:
            reading.add(name)
            together.append(set(reading))
        time.sleep(0.02)
        with lock:
            reading.discard(name)

    for size, expected in ((900, 4), (40_000, 2)):
        together.clear()
        store = CountingStore(before)
        needs = [origin.make(f"{size}-{i}", size, next_use=i) for i in range(6)]
        options = {"budget_bytes": 10**6, "store": store, "streams": 4}
        with StagingArea(str(cache / str(size)), **options) as area, Copiers(area):
            area.update(needs)
            wait_until(lambda area=area: area.figures().copied_shards == 6)
        assert max(map(len, together)) <= expected
        if size == 900:
            assert max(map(len, together)) > 1
        store.close()


# ---- directories that change under it ------------------------------------------------------------


@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link"])
def test_a_directory_that_is_removed_or_replaced_is_filled_anew(
    area: StagingArea, cache: Path, origin: Origin, tmp_path: Path, instead: str
) -> None:
    needs = [origin.make(n, 100) for n in "ab"]
    area.update(needs[:1])
    run(area)
    cache.rename(tmp_path / "away")
    other = tmp_path / "other"
    if instead == "a folder":
        cache.mkdir()
    elif instead == "a link":
        other.mkdir()
        cache.symlink_to(other)
    area.update(needs)
    assert run(area) == 2
    assert copies(area) == names(*needs)
    assert area.figures().cached_shards == 2


def test_a_directory_that_goes_away_in_mid_copy_costs_that_copy(
    cache: Path, origin: Origin, clock: Clock, tmp_path: Path
) -> None:
    need = origin.make("a", 100)
    name = staged_name(need.shard)

    def replace(_: str) -> None:
        """The new directory has a half copy of somebody else's."""
        if not (tmp_path / "away").exists():
            cache.rename(tmp_path / "away")
            cache.mkdir()
            (cache / f".tmp-{name}").write_bytes(b"half")

    with StagingArea(
        str(cache), budget_bytes=250, store=CountingStore(replace), clock=clock
    ) as area:
        area.update([need])
        area.step()
        assert copies(area) == set()
        assert area.figures().errors == 1
        clock.now += 1
        run(area)
        assert (cache / name).read_bytes() == Path(need.shard.url).read_bytes()
    assert not (cache / f".tmp-{name}").exists()


def test_a_directory_that_cannot_be_used_is_reported_once_and_tried_again(
    cache: Path, origin: Origin, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_bytes(b"a file")
    need = origin.make("a", 100)
    with StagingArea(str(cache), budget_bytes=250, clock=clock) as area:
        area.update([need])
        for _ in range(3):
            assert not area.step()
            clock.now += 60
        figures = area.figures()
        assert (figures.errors, figures.missing_shards) == (4, 1)
        assert "cannot be used" in figures.last_error and str(cache) in figures.last_error
        assert area.settled(3)
        assert len(caplog.records) == 1
        cache.unlink()
        assert run(area) == 1
        assert copies(area) == names(need)


def test_a_copy_that_cannot_have_its_name_is_let_go_of(
    area: StagingArea, origin: Origin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    need = origin.make("a", 100)
    area.update([need])
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        patch.setattr(os, "unlink", read_only)
        area.step()
    figures = area.figures()
    assert (figures.errors, figures.cached_bytes) == (1, 0)
    assert "Read-only" in figures.last_error
    clock.now += 1
    assert run(area) == 1
    assert copies(area) == names(need)


@pytest.mark.parametrize("size", [0, 40, 140])
def test_a_copy_of_another_size_is_made_again(
    area: StagingArea, origin: Origin, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    need = origin.make("a", 100)
    area.update([need])
    run(area)
    os.truncate(staged_path(area.cache_dir, need.shard), size)
    area.update([need])
    assert run(area) == 1
    assert Path(staged_path(area.cache_dir, need.shard)).stat().st_size == 100
    assert f"has {size} bytes in place of 100" in caplog.text


def test_what_is_no_file_of_ours_is_not_followed(
    area: StagingArea, cache: Path, origin: Origin
) -> None:
    linked, piped, fine = (origin.make(n, 50) for n in "abc")
    os.symlink(linked.shard.url, cache / f".tmp-{staged_name(linked.shard)}")
    os.mkfifo(cache / f".tmp-{staged_name(piped.shard)}")
    area.update([linked, piped, fine])
    run(area)
    assert names(fine) <= copies(area)
    assert Path(linked.shard.url).stat().st_size == 50
