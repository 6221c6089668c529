import dataclasses
import os
from pathlib import Path

import pytest

from dataservice.actors.holes import Hole
from dataservice.actors.state_log import STEPS_A_RECORD, StateLog
from dataservice.core.exclusions import Exclusions
from dataservice.core.settings import Grid
from dataservice.errors import StorageError
from dataservice.wire.messages import CursorState

GRID = Grid(dp_size=2, micro_steps=4)
HOSTS = {0: ("a",), 1: ("b",)}
HOLE = Hole(
    key="s/a.jsonl@1#0",
    reason="truncated",
    pack_number=17,
    policy="fallback",
    member="a.jpg",
    archive="a.zip",
)


def cursor(step: int, homes: tuple[int, ...] = (-1, -1)) -> CursorState:
    lanes = ((step, 0), (step, 1))
    return CursorState(
        step=step,
        phase=0,
        phase_digest="phase",
        next_pack=(8 * step,),
        lanes=lanes,
        next_lane=(0,),
        lane_homes=homes,
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def opened(path: str, digest: str = "plan") -> StateLog:
    log = StateLog(path)
    log.start_epoch(digest, "a")
    return log


def test_a_session_goes_on_from_its_last_checkpoint(path: str) -> None:
    log = opened(path)
    generation = log.open_session("run", GRID, None, HOSTS, cursor(0), "pil")
    for step in range(STEPS_A_RECORD + 4):
        log.placement(cursor(step), Exclusions())
        log.done(cursor(step))
    log.hole(HOLE)
    log.close()
    for _ in range(3):
        log = opened(path)
        saved = log.session
        assert saved is not None
        assert (saved.generation, saved.run_id, saved.grid) == (generation, "run", GRID)
        assert saved.hosts == HOSTS
        assert (saved.first, saved.built_by) == ((0, 0), "pil")
        assert saved.cursor == cursor(STEPS_A_RECORD)
        assert saved.planned_until == 2 * STEPS_A_RECORD
        assert log.holes == [HOLE]
        log.close()


def test_homes_hold_for_steps_that_may_have_been_handed_out_before_the_start(path: str) -> None:
    log = opened(path)
    log.open_session("run", GRID, None, HOSTS, cursor(0), "pil")
    log.placement(cursor(0, (0, 1)), Exclusions())
    log.placement(cursor(5, (1, 1)), Exclusions())
    assert log.homes_of(3) is None
    log.close()
    log = opened(path)
    assert log.homes_of(4) == (0, (0, 1))
    assert log.homes_of(STEPS_A_RECORD - 1) == (0, (1, 1))
    assert log.homes_of(STEPS_A_RECORD) is None
    log.open_session("next", GRID, None, HOSTS, cursor(0), "pil")
    assert log.homes_of(4) is None
    log.close()


def test_older_runs_stay_fenced_also_under_another_plan(path: str) -> None:
    log = opened(path)
    log.open_session("one", GRID, None, HOSTS, cursor(0), "pil")
    log.open_session("two", GRID, None, HOSTS, cursor(0), "pil")
    log.fence(["late"])
    log.hole(HOLE)
    log.close()
    opened(path, "a third plan").close()
    log = opened(path, "another plan")
    assert log.fenced_runs == {"one", "two", "late"}
    assert log.session is None
    assert log.holes == []
    assert log.open_session("three", GRID, None, HOSTS, cursor(0), "pil") > 2
    log.close()


def test_the_journal_is_rewritten_at_the_start(path: str) -> None:
    log = opened(path)
    log.open_session("run", GRID, None, HOSTS, cursor(0), "pil")
    for step in range(50 * STEPS_A_RECORD):
        log.placement(cursor(step), Exclusions())
        log.done(cursor(step))
    log.close()
    before = Path(path).stat().st_size
    opened(path).close()
    assert Path(path).stat().st_size < before / 5
    assert not Path(path + ".new").exists()


def test_what_could_not_be_written_may_be_written_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(path)
    log.open_session("run", GRID, None, HOSTS, cursor(0), "pil")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=f"journal {path} cannot be written: .*No space"):
            log.placement(cursor(0), Exclusions())
        with pytest.raises(StorageError):
            log.done(cursor(STEPS_A_RECORD))
    log.placement(cursor(0), Exclusions())
    log.done(cursor(STEPS_A_RECORD))
    log.close()
    saved = opened(path).session
    assert saved is not None
    assert [step for step, _ in saved.homes] == [0]
    assert saved.planned_until == STEPS_A_RECORD
    assert saved.cursor == cursor(STEPS_A_RECORD)


def test_a_rewrite_waits_for_the_disk_a_few_times_however_many_holes(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(path)
    for number in range(300):
        log.hole(dataclasses.replace(HOLE, key=f"s/a.jsonl@{number}#0"))
    log.close()
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    log = opened(path)
    assert len(log.holes) == 300
    assert len(synced) < 10
    log.close()
    log = opened(path)
    assert [hole.key for hole in log.holes] == [f"s/a.jsonl@{number}#0" for number in range(300)]
    log.close()
