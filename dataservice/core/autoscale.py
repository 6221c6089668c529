"""How many workers there should be, from what trainers waited for them and how busy they were.

Invariants: a pure function of its state and one period's figures, and so are its words; the target
stays within its bounds; nothing grows while workers are starting, while the present ones have time
left, or after more of them brought nothing.

While workers are what holds trainers up, n of them give a share 1 - w of what is wanted, w being
the share of their time that trainers wait: n / (1 - w) are needed. Where nobody waits, the busy
share of the workers' time tells how many would do; that is an estimate, so a number that turned out
too small is not tried again for a while, longer each time, unless less is read than then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

WAITS = 0.03
"""Trainers that wait a larger share of their time need more workers."""
QUIET = 0.005
"""Trainers that wait a smaller one may do with fewer."""
MOST_GROWTH = 2.0
"""Most that the number grows by at once: the estimate is poor where trainers wait nearly always."""
BUSY_TO_GROW = 0.5
"""Workers that are less busy are not what trainers wait for."""
BUSY_AT_MOST = 0.8
"""Share of their time that the workers should be busy once some of them have gone."""
QUIET_S = 60.0
"""Nobody may have waited for so long before workers go."""
SLOWEST_SHRINK = 4
"""At most one in so many workers goes at once, and always one."""
SLOW_GAIN = 0.25
"""Of what more workers should bring; bringing less, they brought nothing."""
GAIN_AFTER = 1.5
"""What they brought is judged once there are so many times as many."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 300.0, 3600.0
"""Before a number is tried again that was too small, or that brought nothing; doubled each time it
proves so again."""
LESS_READ = 0.75
"""Of the packs a second at which a number was too small: then it may be tried at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    least: int
    most: int
    why_most: str = "workers.max"
    """What makes it the most, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """What was seen since the last decision."""

    seconds: float
    waited_share: float
    """Of the time of the rank that waited longest for workers to build packs; not for the plan,
    other ranks or its first batch. 0..1."""
    packs_per_s: float
    """That trainers fetched."""
    busy_share: float
    """Of the time of the workers' builders. 0..1."""
    queued_packs: int
    """Given to workers and not built, now."""
    ready_packs: int
    """Built and not fetched, now."""
    ready_share: float
    """Bytes of built packs, of the bytes that workers may hold, now. 0..1."""
    alive: int
    """Workers that take new packs, now; not those that are starting or draining."""
    draining: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Before something is tried again."""

    left_s: float = 0.0
    next_s: float = FIRST_PAUSE_S

    def later(self, seconds: float) -> Pause:
        return replace(self, left_s=max(0.0, self.left_s - seconds))

    def begun(self, *, longer: bool) -> Pause:
        """`longer`: the next one takes twice as long."""
        next_s = min(LONGEST_PAUSE_S, 2 * self.next_s) if longer else self.next_s
        return Pause(left_s=self.next_s, next_s=next_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    target: int
    settling: bool = False
    """The last change has not been in effect for a whole period."""
    shrunk: bool = False
    """The last change was to fewer, because they seemed enough."""
    waiting: bool = False
    """Trainers waited in the last period; a single one is no reason to grow."""
    quiet_s: float = 0.0
    """Nobody has waited for so long."""
    too_few: tuple[int, float] = (0, 0.0)
    """Workers for which trainers had to wait, and packs a second that they gave, being busy."""
    not_fewer: Pause = field(default_factory=Pause)
    """Before so few are tried again."""
    base: tuple[int, float] | None = None
    """Workers, and packs a second, from which the number has grown; None once nobody has waited for
    QUIET_S."""
    not_more: Pause = field(default_factory=Pause)
    """Before more are tried again, which brought nothing; over once nobody has waited for QUIET_S
    and workers have time left: after a pause of the trainers nobody waits for a while, whatever the
    workers give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    state: State
    reason: str

    @property
    def target(self) -> int:
        return self.state.target


def decide(state: State, period: Period, limits: Limits) -> Decision:
    """The next state, with the number of workers to go for, and why."""
    target = max(limits.least, min(limits.most, state.target))
    if target != state.target:
        bound = limits.why_most if target == limits.most else "workers.min"
        return _changed(state, target, f"{target}: {bound} bounds it")
    state = replace(
        state,
        not_fewer=state.not_fewer.later(period.seconds),
        not_more=state.not_more.later(period.seconds),
    )
    if period.waited_share > WAITS:
        decision = _while_waiting(replace(state, quiet_s=0.0), period, limits)
        waiting = decision.target == target
        return replace(decision, state=replace(decision.state, waiting=waiting))
    state = replace(state, waiting=False)
    if period.waited_share > QUIET:
        reason = f"trainers wait {period.waited_share:.1%} of their time, which is little"
        return Decision(state=replace(state, quiet_s=0.0, settling=False), reason=reason)
    return _while_quiet(state, period, limits)


def _changed(state: State, target: int, reason: str) -> Decision:
    changed = replace(
        state, target=target, settling=True, shrunk=target < state.target, quiet_s=0.0
    )
    return Decision(state=changed, reason=reason)


def _while_waiting(state: State, period: Period, limits: Limits) -> Decision:
    have, target = min(period.alive, state.target), state.target
    waits = f"trainers wait {period.waited_share:.0%} of their time for packs"

    def hold(why: str) -> Decision:
        return Decision(state=state, reason=f"{waits}; {why}")

    if have < target:
        return hold(f"{target - have} of {target} workers are starting")
    if state.settling:
        state = replace(state, settling=False)
        return hold(f"going to {target} workers is too new to be judged")
    if period.queued_packs == 0:
        return hold("but none is left to build: more workers would not help")
    if period.busy_share < BUSY_TO_GROW:
        return hold(f"but workers are busy {period.busy_share:.0%}: more would not help")
    if not state.waiting:
        return hold("if it stays so, workers are added")
    state = replace(
        state,
        shrunk=False,
        too_few=(have, period.packs_per_s),
        not_fewer=state.not_fewer.begun(longer=state.shrunk),
    )
    if state.base is None or have <= state.base[0]:
        state = replace(state, base=(have, period.packs_per_s))
    elif have >= GAIN_AFTER * state.base[0]:
        before, rate = state.base
        if period.packs_per_s <= rate * (1 + SLOW_GAIN * (have / before - 1)):
            state = replace(state, not_more=state.not_more.begun(longer=True))
            reason = f"{waits}; {have} workers bring no more than {before} did: back to {before}"
            back = _changed(state, max(before, limits.least), reason)
            return replace(back, state=replace(back.state, shrunk=False))
        state = replace(state, base=(have, period.packs_per_s))
    if state.not_more.left_s > 0:
        left_s = state.not_more.left_s
        return hold(f"more workers brought nothing; they are tried again in {left_s:.0f} s")
    if target >= limits.most:
        return hold(f"{limits.why_most} allows no more than {limits.most} workers")
    needed = have / max(1.0 - period.waited_share, 1.0 / MOST_GROWTH)
    grown = min(limits.most, max(have + 1, math.ceil(needed)))
    return _changed(state, grown, f"{waits}: from {target} to {grown} workers")


def _while_quiet(state: State, period: Period, limits: Limits) -> Decision:
    target = state.target
    if period.packs_per_s <= 0:
        return Decision(state=replace(state, quiet_s=0.0), reason="no trainer reads")
    if period.draining:
        reason = f"nobody waits; {period.draining} workers are still draining"
        return Decision(state=replace(state, quiet_s=0.0), reason=reason)
    quiet_s = state.quiet_s + period.seconds
    state = replace(state, quiet_s=quiet_s, settling=False)
    if quiet_s >= QUIET_S:
        idle = period.busy_share < BUSY_AT_MOST
        state = replace(state, base=None, not_more=Pause() if idle else state.not_more)
    fewer = _fewer(state, period, limits)
    seen = (
        f"nobody waits, workers are busy {period.busy_share:.0%}, "
        f"their room for built packs is {period.ready_share:.0%} full"
    )
    if fewer >= target:
        return Decision(state=state, reason=f"{seen}: {target} are just enough")
    if quiet_s < QUIET_S:
        return Decision(state=state, reason=f"{seen}: {fewer} may do, if it stays so")
    if state.shrunk:  # and it went well
        state = replace(state, not_fewer=replace(state.not_fewer, next_s=FIRST_PAUSE_S))
    return _changed(state, fewer, f"{seen}: from {target} to {fewer} workers")


def _fewer(state: State, period: Period, limits: Limits) -> int:
    """Workers that would do; not many fewer than there are."""
    have, (too_few, rate) = period.alive, state.too_few
    if period.queued_packs and not period.ready_packs:
        return max(have, limits.least)  # nobody waits, but the workers are behind
    enough = max(limits.least, math.ceil(have * period.busy_share / BUSY_AT_MOST))
    if state.not_fewer.left_s > 0 and period.packs_per_s > LESS_READ * rate:
        enough = max(enough, too_few + 1)
    return max(enough, have - max(1, have // SLOWEST_SHRINK))
