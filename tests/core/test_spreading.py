import numpy as np
import pytest

from dataservice.core.spreading import HEARTBEATS_S, REPORTS_S, ask_at, lease_of, poll_s, report_s


@pytest.mark.parametrize("micro_steps", [1, 2, 16, 128])
def test_ranks_ask_evenly_over_the_first_half_of_a_step(micro_steps: int) -> None:
    ranks = 1024
    asked = np.bincount([ask_at(rank, micro_steps) for rank in range(ranks)])
    slots = max(1, micro_steps // 2)
    assert len(asked) == slots
    assert asked.max() - asked.min() <= 4


def test_few_are_not_slowed_down() -> None:
    assert lease_of(64, 2.0) == 2.0
    assert report_s(64, 5.0) == 5.0


def test_many_together_are_heard_at_a_bounded_rate() -> None:
    assert 4096 / report_s(4096, 5.0) <= REPORTS_S
    assert 512 / (lease_of(512, 2.0) / 2) <= HEARTBEATS_S


def test_polls_that_began_together_end_apart_and_none_is_longer_than_asked() -> None:
    lasts = [poll_s(3.0, draw) for draw in np.linspace(0, 1, 100, endpoint=False)]
    assert 2.0 < min(lasts) and max(lasts) <= 3.0
    assert np.diff(lasts).min() > 0.005
