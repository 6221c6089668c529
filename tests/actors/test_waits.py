"""Each rank's wait of late, whatever the pace of its reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dataservice.actors import waits
from dataservice.actors.waits import GAP_S, LATELY_S, Waits


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [1000.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: times[0]))
    return times


def reported(now: list[float], seen: Waits, seconds: float, every_s: float, share: float) -> None:
    """Rank 0, which waits `share` of its time, half of it for workers."""
    for _ in range(round(seconds / every_s)):
        now[0] += every_s
        seen.note(1, 0, 0, share * every_s / 2, in_all_s=share * every_s)


@pytest.mark.parametrize("every_s", [0.05, 1.0, 7.0, 50.0])
def test_the_share_is_of_the_last_half_minute(now: list[float], every_s: float) -> None:
    seen = Waits()
    seen.note(1, 0, 0, 5.0, in_all_s=9.0)  # of before; it only starts the clock
    reported(now, seen, 200, every_s, 0.8)
    (in_all,), (for_workers,) = seen.lately(1, 1)
    assert (in_all, for_workers) == (pytest.approx(0.8), pytest.approx(0.4))
    reported(now, seen, 2 * max(LATELY_S, every_s), every_s, 0.1)
    (in_all,), (for_workers,) = seen.lately(1, 1)
    assert (in_all, for_workers) == (pytest.approx(0.1, abs=0.02), pytest.approx(0.05, abs=0.01))


def test_few_reports_are_kept_of_many(now: list[float]) -> None:
    seen = Waits()
    reported(now, seen, 60, 0.01, 0.5)
    (rank,) = seen._ranks.values()
    assert len(rank.recent) <= LATELY_S / GAP_S + 3


def test_a_rank_is_as_late_as_its_latest_peer_and_unheard_ranks_wait_not(now: list[float]) -> None:
    seen = Waits()
    for peer, waited_s in ((0, 1.0), (1, 3.0)):
        seen.note(1, 2, peer, 0.0)
        now[0] += 4.0
        seen.note(1, 2, peer, 0.0, in_all_s=waited_s)
    assert seen.lately(1, 4)[0] == [0.0, 0.0, pytest.approx(0.75), 0.0]
    assert seen.lately(2, 4)[0] == [0.0] * 4  # another session, of which nothing is known
