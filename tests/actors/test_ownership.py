from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataservice.actors import ownership
from dataservice.actors.holes import Hole
from dataservice.actors.ownership import LOCK, OWNER, Ownership, take
from dataservice.actors.state_log import JOURNAL, StateLog
from dataservice.errors import JobHeld

LEASE_S = 0.2
HOLE = Hole(key="s/a@1#0", reason="bad", pack_number=1, policy="hole", member="", archive="")


def taken(folder: Path) -> Ownership:
    return take(folder, job="cats", lease_s=LEASE_S)


def go_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """From here on, folders are taken on a machine that the locks of the first do not reach."""
    patch.setattr(ownership, "machine", lambda: "other")
    patch.setattr(ownership, "LOCK", f"{LOCK}.other")


def test_a_second_coordinator_of_this_machine_is_refused_at_once(tmp_path: Path) -> None:
    first = taken(tmp_path)
    first.endpoint = "127.0.0.1:7070"
    first.renew()
    began = time.monotonic()
    with pytest.raises(JobHeld) as refused:
        taken(tmp_path)
    assert time.monotonic() - began < LEASE_S
    text = str(refused.value)
    for word in ("job cats", "epoch 1", f"process {os.getpid()}", "serving at 127.0.0.1:7070"):
        assert word in text
    first.release()
    first.release()
    second = taken(tmp_path)
    assert second.epoch == 2
    with pytest.raises(JobHeld, match="now held by the coordinator of job cats with epoch 2"):
        first.check()
    second.release()


def test_an_owner_that_lives_is_not_superseded_from_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(tmp_path)
    stopping = threading.Event()

    def live() -> None:
        while not stopping.wait(LEASE_S / ownership.RENEWALS_A_LEASE):
            first.renew()

    thread = threading.Thread(target=live)
    thread.start()
    go_elsewhere(monkeypatch)
    try:
        for _ in range(3):
            with pytest.raises(JobHeld, match="epoch 1"):
                taken(tmp_path)
    finally:
        stopping.set()
        thread.join()
    first.release()
    began = time.monotonic()
    second = taken(tmp_path)
    assert time.monotonic() - began < LEASE_S  # the first one has said that it is gone
    assert second.epoch == 2
    second.release()


def test_a_silent_owner_is_superseded_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / JOURNAL)
    first = StateLog(path, taken(tmp_path))
    first.start_epoch("plan", "a")
    first.hole(HOLE)
    old = first.ownership
    assert old is not None
    old.check_if_old()
    go_elsewhere(monkeypatch)
    began = time.monotonic()
    second = StateLog(path + ".copy", taken(tmp_path))  # the journal's own lock reaches here
    assert time.monotonic() - began >= 2 * LEASE_S
    assert second.ownership is not None
    assert second.ownership.epoch == 2
    before = Path(path).read_bytes()
    for write in (lambda: first.fence(["late"]), lambda: first.start_epoch("plan", "a")):
        with pytest.raises(JobHeld, match="hands out nothing more"):
            write()
    for asked in (old.check_if_old, old.renew, old.check):
        with pytest.raises(JobHeld, match="epoch 2"):
            asked()
    assert Path(path).read_bytes().startswith(before)
    second.ownership.check()
    first.close()
    second.ownership.renew()
    second.close()


def test_an_owner_that_comes_back_at_the_last_moment_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(tmp_path)
    go_elsewhere(monkeypatch)
    silent_until = time.monotonic() + (ownership.WATCH_LEASES - 0.5) * LEASE_S

    def sleep(_: float) -> None:
        """The first one is paused until just before the last look."""
        if time.monotonic() < silent_until:
            time.sleep(silent_until - time.monotonic())
            return
        first.renew()
        time.sleep(LEASE_S)

    monkeypatch.setattr(ownership, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(JobHeld, match="epoch 1"):
        taken(tmp_path)
    first.check()
    first.release()


def test_an_owner_whose_file_is_gone_stops(tmp_path: Path) -> None:
    owner = taken(tmp_path)
    (tmp_path / OWNER).unlink()
    with pytest.raises(JobHeld, match="is gone"):
        owner.renew()
    owner.release()


def test_a_damaged_owners_file_is_no_owner(tmp_path: Path) -> None:
    taken(tmp_path).release()
    (tmp_path / OWNER).write_bytes(b"\0" * 2048)
    owner = taken(tmp_path)
    owner.check()
    owner.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, OWNER]


def test_checking_is_cheap(tmp_path: Path) -> None:
    owner = taken(tmp_path)
    began = time.perf_counter()
    for _ in range(1000):
        owner.check()
    per_check = (time.perf_counter() - began) / 1000
    print(f"a check takes {per_check * 1e6:.0f} us")
    assert per_check < 0.005
    owner.release()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_locks_will_do(tmp_path: Path) -> None:
    path = str(tmp_path / JOURNAL)
    first = StateLog(path, taken(tmp_path))
    first.start_epoch("plan", "cats")
    first.hole(HOLE)
    began = time.monotonic()
    second = StateLog(path, taken(tmp_path))  # which has watched the first one in vain
    assert time.monotonic() - began >= 2 * LEASE_S
    assert second.holes == [HOLE]
    with pytest.raises(JobHeld, match="epoch 2"):
        first.fence(["late"])
    first.close()
    second.close()


@pytest.mark.usefixtures("without_locks")
def test_a_journal_that_was_rewritten_too_late_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / JOURNAL)
    first = StateLog(path, taken(tmp_path))
    seconds: list[StateLog] = []
    replace = os.replace

    def late(fresh: str, place: str) -> None:
        """Its writer is paused here until another has taken over."""
        monkeypatch.setattr(os, "replace", replace)
        seconds.append(StateLog(path, taken(tmp_path)))
        seconds[0].start_epoch("plan", "cats")
        seconds[0].hole(HOLE)
        replace(fresh, place)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(JobHeld, match="epoch 2"):
        first.start_epoch("plan", "cats")
    first.close()
    seconds[0].close()
    third = StateLog(path, taken(tmp_path))
    assert third.holes == [HOLE]
    third.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [JOURNAL, LOCK, OWNER]
