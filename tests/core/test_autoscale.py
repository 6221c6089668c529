"""Decisions of the autoscaler against a simulated fleet and scripted demand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.autoscale import (
    BUSY_AT_MOST,
    FIRST_PAUSE_S,
    Decision,
    Limits,
    Period,
    State,
    decide,
)

PERIOD_S = 6
START_S = 8
LIMITS = Limits(least=1, most=32)
Demand = Callable[[float], float]
"""Time in seconds -> workers whose whole time the trainers' reading takes."""


@dataclass
class Run:
    targets: list[int] = field(default_factory=list)
    """By second."""
    waited: list[float] = field(default_factory=list)
    """Share of each second that trainers waited."""
    decisions: list[Decision] = field(default_factory=list)

    def changes(self, since_s: int = 0) -> int:
        part = self.targets[since_s:]
        return sum(a != b for a, b in itertools.pairwise(part))

    def share_waited(self, since_s: int) -> float:
        return float(np.mean(self.waited[since_s:]))


@dataclass
class Fleet:
    """Workers of one pack a second each; trainers read what is ready and wait for the rest."""

    seed: int = 0
    noise: float = 0.05
    bias: float = 1.2
    """Workers look less busy than they are: by this power of it."""
    drain_s: int = 15
    cores: int | None = None
    """So many workers give all that the machine has."""
    buffer_s: float = 3.0
    """Packs that a worker holds ready."""

    def run(self, demand: Demand, seconds: int, *, start: int = 1, limits: Limits = LIMITS) -> Run:
        rng = np.random.Generator(np.random.Philox(self.seed))
        state, run = State(target=start), Run()
        alive, ready = start, 0.0
        starting: list[int] = []
        draining: list[int] = []
        waited: list[float] = []
        built: list[float] = []
        served: list[float] = []
        for now in range(seconds):
            while alive + len(starting) < state.target:
                starting.append(now + START_S + int(rng.integers(0, 3)))
            surplus = alive + len(starting) - state.target
            while surplus > 0:
                surplus -= 1
                if starting:
                    starting.pop()
                else:
                    alive -= 1
                    draining.append(now + self.drain_s)
            alive += sum(at <= now for at in starting)
            starting = [at for at in starting if at > now]
            draining = [at for at in draining if at > now]
            working = min(alive, self.cores or alive)
            capacity = working * max(0.1, 1 + self.noise * rng.standard_normal())
            wanted = demand(now)
            room = max(0.0, self.buffer_s * max(1, alive) - ready + wanted)
            made = min(capacity, room)
            got = min(wanted, ready + made)
            ready += made - got
            waited.append(1 - got / wanted if wanted else 0.0)
            built.append((made / capacity) ** self.bias)
            served.append(got)
            run.waited.append(waited[-1])
            run.targets.append(state.target)
            if (now + 1) % PERIOD_S == 0:
                period = Period(
                    seconds=PERIOD_S,
                    waited_share=float(np.mean(waited)),
                    packs_per_s=float(np.mean(served)),
                    busy_share=float(np.mean(built)),
                    queued_packs=100 if ready < self.buffer_s * alive else 20,
                    ready_packs=int(ready),
                    ready_share=min(1.0, ready / max(1.0, self.buffer_s * alive)),
                    alive=alive,
                    draining=len(draining),
                )
                decision = decide(state, period, limits)
                run.decisions.append(decision)
                state = decision.state
                waited.clear(), built.clear(), served.clear()
        return run


def reached(run: Run, needed: float, since_s: int) -> float:
    """Seconds from `since_s` until the target is enough, and stays so."""
    least = math.ceil(needed)
    late = [t for t, target in enumerate(run.targets) if t >= since_s and target < least]
    return 0 if not late else late[-1] + 1 - since_s


def most_after(needed: float) -> int:
    """Workers that are still "just enough": busy as they should be, and one more."""
    return math.ceil(needed / BUSY_AT_MOST) + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("needed", [1.5, 3.4, 7.6, 20.0])
def test_step_up_is_followed_within_a_bounded_time(seed: int, needed: float) -> None:
    run = Fleet(seed=seed).run(lambda t: 0.6 if t < 120 else needed, 1500)
    assert run.targets[119] == 1
    doublings = math.ceil(math.log2(needed)) + 1
    assert reached(run, needed, 120) <= 35 * doublings
    assert max(run.targets) <= math.ceil(needed * 1.35) + 1
    assert run.share_waited(120 + 35 * doublings + START_S + 5) < 0.02
    assert run.targets[-1] <= most_after(needed)
    assert run.changes(600) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_step_down_is_followed_slowly_and_nobody_waits(seed: int) -> None:
    run = Fleet(seed=seed).run(lambda t: 12.4 if t < 300 else 3.3, 2400, start=13)
    assert run.targets[299] >= 13
    assert run.targets[-1] <= most_after(3.3)
    settled = next(t for t in range(300, 2400) if run.targets[t] <= most_after(3.3))
    assert settled - 300 < 900
    assert run.share_waited(300) < 0.01
    assert run.changes(1500) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_short_spike_changes_nothing(seed: int) -> None:
    run = Fleet(seed=seed).run(lambda t: 8.0 if 203 <= t < 209 else 2.8, 900, start=4)
    assert max(run.targets) == 4
    assert run.changes() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_long_spike_is_followed_up_once_and_down_again(seed: int) -> None:
    run = Fleet(seed=seed).run(lambda t: 8.0 if 300 <= t < 420 else 2.8, 2400, start=4)
    assert 8 <= max(run.targets) <= most_after(8.0)
    assert run.targets[-1] <= most_after(2.8)
    assert run.changes() <= 10
    assert run.share_waited(420) < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_drift_is_followed_without_flapping(seed: int) -> None:
    run = Fleet(seed=seed).run(lambda t: 4 + 12 * min(1, t / 3600), 5400, start=5)
    assert 16 <= run.targets[-1] <= most_after(16.0)
    assert run.share_waited(0) < 0.03
    ups_and_downs = [b - a for a, b in itertools.pairwise(run.targets) if a != b]
    assert sum(change < 0 for change in ups_and_downs) <= 2
    assert len(ups_and_downs) <= 18


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bias", [0.8, 1.0, 1.5, 2.5])
@pytest.mark.parametrize("needed", [2.3, 5.7])
def test_constant_demand_comes_to_rest(seed: int, bias: float, needed: float) -> None:
    """Also where the busy share misleads: a number that was too small is tried ever more rarely."""
    run = Fleet(seed=seed, bias=bias, noise=0.1).run(lambda _: needed, 7200, start=1)
    assert run.changes(600) <= 8
    assert run.share_waited(300) < 0.02
    assert math.floor(needed) <= run.targets[-1] <= most_after(needed)


def test_a_machine_that_gives_no_more_is_not_given_more_workers_for_ever() -> None:
    run = Fleet(cores=4).run(lambda _: 12.0, 7200)
    assert max(run.targets) == 8
    assert np.mean(np.asarray(run.targets) == 4) > 0.9
    assert any("8 workers bring no more than 4 did" in d.reason for d in run.decisions)


@pytest.mark.parametrize("wanted", [4.3, 5.0, 6.0])
@pytest.mark.parametrize("every_s", [300, 600])
def test_pauses_of_the_trainers_are_no_news_of_what_more_workers_bring(
    wanted: float, every_s: int
) -> None:
    """Half a minute for a checkpoint, after which ready packs last for a while."""
    fleet = Fleet(cores=4, buffer_s=10.0)
    run = fleet.run(lambda t: 0.0 if t % every_s < 30 else wanted, 7200)
    assert run.changes(600) <= 12


def test_bounds_hold_whatever_the_demand() -> None:
    limits = Limits(least=2, most=6, why_most="the data nodes' cores")
    run = Fleet().run(lambda t: 30.0 if t < 600 else 0.1, 2400, start=3, limits=limits)
    assert max(run.targets) == 6 and run.targets[-1] == 2 == min(run.targets)
    assert any("the data nodes' cores allows no more than 6" in d.reason for d in run.decisions)


QUIET = Period(
    seconds=PERIOD_S,
    waited_share=0.0,
    packs_per_s=10.0,
    busy_share=0.3,
    queued_packs=10,
    ready_packs=40,
    ready_share=0.9,
    alive=4,
)
WAITING = replace(QUIET, waited_share=0.5, busy_share=1.0, ready_packs=0, ready_share=0.0)


def after(state: State, *periods: Period) -> Decision:
    for period in periods:
        decision = decide(state, period, LIMITS)
        state = decision.state
    return decision


def test_half_the_time_waited_doubles_the_workers_at_the_second_period() -> None:
    once = decide(State(target=4), WAITING, LIMITS)
    assert (once.target, decide(once.state, WAITING, LIMITS).target) == (4, 8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alive": 3}, "1 of 4 workers are starting"),
        ({"queued_packs": 0}, "none is left to build"),
        ({"busy_share": 0.2}, "workers are busy 20%: more would not help"),
    ],
)
def test_more_are_not_asked_for_where_they_do_not_help(
    change: dict[str, float], reason: str
) -> None:
    decision = after(State(target=4), *[replace(WAITING, **change)] * 5)
    assert decision.target == 4 and reason in decision.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"packs_per_s": 0.0}, "no trainer reads"),
        ({"draining": 2}, "2 workers are still draining"),
        ({"ready_packs": 0}, "just enough"),
        ({"busy_share": 0.79}, "just enough"),
        ({"waited_share": 0.02}, "which is little"),
    ],
)
def test_workers_stay_where_it_is_not_sure_that_fewer_would_do(
    change: dict[str, float], reason: str
) -> None:
    decision = after(State(target=4), *[replace(QUIET, **change)] * 20)
    assert decision.target == 4 and reason in decision.reason


def test_workers_that_do_not_come_are_given_up_once_nobody_waits() -> None:
    state = State(target=9, settling=True)
    assert after(state, *[QUIET] * 20).target <= 4


def test_what_brought_nothing_is_tried_again_after_a_while() -> None:
    grown = after(State(target=4), WAITING, WAITING).state
    eight = replace(WAITING, alive=8)
    back = after(grown, *[eight] * 2)
    assert back.target == 4 and "8 workers bring no more than 4 did" in back.reason
    held = after(back.state, *[WAITING] * 5)
    assert held.target == 4 and "tried again in" in held.reason
    assert after(held.state, *[WAITING] * (int(FIRST_PAUSE_S) // PERIOD_S)).target == 8


def test_a_store_that_gives_nothing_is_not_asked_by_ever_more_workers() -> None:
    state, targets = State(target=4), []
    for _ in range(1200):
        stalled = replace(WAITING, waited_share=1.0, packs_per_s=0.0, alive=state.target)
        state = decide(state, stalled, LIMITS).state
        targets.append(state.target)
    assert max(targets) == 8
    assert np.mean(np.asarray(targets) == 4) > 0.9


def test_what_more_workers_bring_is_seen_anew_when_they_are_tried_again() -> None:
    """Not measured by what was read before the packs became heavier."""
    state = State(target=4, base=(4, 12.0))
    for _ in range(20):
        loaded = replace(WAITING, packs_per_s=float(state.target), alive=state.target)
        state = decide(state, loaded, LIMITS).state
    assert state.target == LIMITS.most


shares = st.floats(0, 1)
periods = st.builds(
    Period,
    seconds=st.floats(0.1, 100),
    waited_share=shares,
    packs_per_s=st.floats(0, 1e4),
    busy_share=shares,
    queued_packs=st.integers(0, 1000),
    ready_packs=st.integers(0, 1000),
    ready_share=shares,
    alive=st.integers(0, 64),
    draining=st.integers(0, 4),
)


@settings(deadline=None)
@given(st.lists(periods, max_size=40), st.integers(1, 8), st.integers(8, 40))
def test_no_figures_lead_out_of_the_bounds(seen: list[Period], least: int, most: int) -> None:
    state = State(target=1)
    for period in seen:
        decision = decide(state, period, Limits(least=least, most=most))
        assert least <= decision.target <= most and decision.reason
        state = decision.state
