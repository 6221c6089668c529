"""The planner's own figures, each beside the value it has to reach.

Invariants: a check compares what was measured in this run; plans and packs are those of the
synthetic workloads; times are CPU time of one thread, medians.
"""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from planner_common import (
    GRAVITY,
    MOSTLYVL_8K,
    MOSTLYVL_32K,
    REPEATS,
    TEXT80_8K,
    Check,
    Workload,
    median_s,
    packed,
    percent,
    relative_time,
    scenario,
    shuffled,
)

from dataservice.core.balance import Assignment, assign
from dataservice.core.cost import measure
from dataservice.core.cursor import Cursor
from dataservice.core.packing import PackRules
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, SourceShare
from dataservice.core.simulate import simulate
from dataservice.core.simulate.pool import PackPool
from dataservice.core.simulate.workloads import MEGAPIXEL, correlated, vision
from dataservice.core.tables import StepPlan

Ints = NDArray[np.int64]

BIG = Grid(dp_size=1024, micro_steps=16)
PER_NODE = 8
RATIOS = ("0.2", "0.5", "1", "2", "5", "10", "20")
MILLION = 1_000_000


# ---- fill and speed ------------------------------------------------------------------------------


def packing() -> list[Check]:
    checks = []
    speeds: dict[str, list[float]] = {"lbf": [], "balanced": []}
    for mix, goals in (
        ("mostlyvl", {"lbf": 0.999, "balanced": 0.996}),
        ("text80", {"lbf": 0.999, "balanced": 0.987}),
    ):
        samples = shuffled(mix, 98_304, 8192, 4)
        for packer, goal in goals.items():
            rules = PackRules(packer=packer, pack_length=8192)  # type: ignore[arg-type]
            runs = [packed(samples, rules, 4096, by="image_tokens") for _ in range(REPEATS + 1)]
            speeds[packer].append(float(np.median([run.rate for run in runs[1:]])))
            checks.append(
                Check(
                    what=f"fill at 8K, closed windows of 4,096: {packer}, {mix}",
                    target=f"{percent(goal)}",
                    found=percent(runs[0].fill, 2),
                    good=round(runs[0].fill, 4) >= goal,
                )
            )
    for packer, least in (("lbf", 1e6), ("balanced", 1e5)):
        slowest = min(speeds[packer])
        checks.append(
            Check(
                what=f"speed of {packer}, samples/s (slower of the two mixes)",
                target=f"{least:,.0f}",
                found=f"{slowest:,.0f}",
                good=slowest >= least,
            )
        )
    return checks


# ---- placement -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    name: str
    cost: Ints
    home: Ints


@cache
def _steps() -> tuple[_Step, ...]:
    """A global batch of 1,024 x 16 packs: of a plan's lanes, and of ranks that read own shards."""
    found = []
    for mix, workload in (("mostlyvl", MOSTLYVL_8K), ("text80", TEXT80_8K)):
        nodes = BIG.dp_size // PER_NODE
        pool = dataclasses.replace(workload, lanes=nodes, window=1024).pool("lbf", BIG, 1)
        lane = np.arange(BIG.num_packs) % nodes
        found.append(_Step(name=f"{mix}, a lane a node", cost=pool.all("cost"), home=lane))
        for open_shards in (1, 8):
            found.append(_of_shards(mix, open_shards))
    return tuple(found)


def _of_shards(mix: str, open_shards: int) -> _Step:
    rules = PackRules(packer="lbf", pack_length=8192)
    cost = np.empty((BIG.dp_size, BIG.micro_steps), dtype=np.int64)
    for rank in range(BIG.dp_size):
        columns = correlated(
            mix, rank, BIG.dp_size, 1024, open_shards, pack_length=8192, max_pixels=4 * MEGAPIXEL
        )
        samples = measure(columns, rules=vision(4 * MEGAPIXEL))
        cost[rank] = np.resize(packed(samples, rules, 1024).cost, BIG.micro_steps)
    home = np.arange(BIG.num_packs) % BIG.dp_size // PER_NODE
    return _Step(name=f"{mix}, {open_shards} open", cost=cost.T.ravel(), home=home)


def _assigned(step: _Step, *, domain: int, tolerance: float) -> Assignment:
    return assign(
        step.cost,
        step.home,
        dp_size=BIG.dp_size,
        micro_steps=BIG.micro_steps,
        ranks_per_node=PER_NODE,
        sync_domain=domain,
        tolerance=tolerance,
    )


def placement() -> list[Check]:
    strict = [_assigned(step, domain=BIG.dp_size, tolerance=0) for step in _steps()]
    loose = [_assigned(step, domain=BIG.dp_size, tolerance=0.01) for step in _steps()]
    lockstep = max(found.lockstep / found.lockstep_bound for found in strict)
    end = max(found.end / found.end_bound for found in loose)
    checks = [
        _at_most("lockstep over its exact optimum, tolerance 0, 6 batches", lockstep, 1.0, 6),
        _at_most("end of step over its bound given the rows, 6 batches", end, 1.02, 4),
    ]
    for domain in (1, 8, 64, 256, 1024):
        placed = {s.name: _assigned(s, domain=domain, tolerance=0.01) for s in _steps()}
        over = {name: found.sync / found.sync_bound for name, found in placed.items()}
        check = _at_most(
            f"domain of {domain:,} over its bound, R=1024 G=16", max(over.values()), 1.02, 4
        )
        worst = max(over, key=lambda name: over[name])
        checks.append(dataclasses.replace(check, detail=f"most on {worst}"))
    for step, found in zip(_steps(), loose, strict=True):
        moved, bound = (n / BIG.num_packs for n in (found.moved, found.moved_bound))
        checks.append(
            Check(
                what=f"packs moved, 8 ranks a node, tolerance 1 %: {step.name}",
                target=f"{percent(bound + 0.03)} (bound + 3)",
                found=percent(moved),
                good=moved <= bound + 0.03,
            )
        )
    equal = _Step(name="equal", cost=np.ones(BIG.num_packs, dtype=np.int64), home=_steps()[1].home)
    moved = _assigned(equal, domain=BIG.dp_size, tolerance=0.01).moved
    checks.append(
        Check(what="packs moved, all costs equal", target="0", found=str(moved), good=moved == 0)
    )
    return checks


def _at_most(what: str, value: float, limit: float, digits: int) -> Check:
    return Check(
        what=what,
        target=f"{limit:.{digits}f}",
        found=f"{value:.{digits}f}",
        good=value <= limit,
    )


def times() -> list[Check]:
    checks = []
    for ranks, micro_steps, limit_ms in ((1024, 16, 50), (1024, 128, 300), (4096, 128, 1500)):
        cost, home = _many(ranks * micro_steps, ranks)
        seconds = median_s(lambda c=cost, h=home, r=ranks, g=micro_steps: _place(c, h, r, g))  # type: ignore[misc]
        checks.append(
            Check(
                what=f"assign, {ranks} x {micro_steps}",
                target=f"{limit_ms} ms",
                found=f"{1000 * seconds:.0f} ms",
                good=1000 * seconds <= limit_ms,
            )
        )
    tracemalloc.start()
    _place(cost, home, ranks, micro_steps)
    peak = tracemalloc.get_traced_memory()[1] / len(cost)
    tracemalloc.stop()
    checks.append(
        Check(
            what="memory of assign, 4096 x 128, at its peak",
            target="100 bytes a pack",
            found=f"{peak:.0f}",
            good=peak < 100,
        )
    )
    return checks


def _many(num_packs: int, ranks: int) -> tuple[Ints, Ints]:
    """Costs and homes of that many packs, the big batch over and over with its costs moved."""
    base = _steps()[1].cost
    rounds = np.arange(num_packs) // len(base)
    return np.resize(base, num_packs) + rounds, np.arange(num_packs) % ranks // PER_NODE


def _place(cost: Ints, home: Ints, ranks: int, micro_steps: int) -> None:
    assign(cost, home, dp_size=ranks, micro_steps=micro_steps, ranks_per_node=PER_NODE)


# ---- idle share and goodput ----------------------------------------------------------------------


def idle() -> list[Check]:
    checks = []
    for name, workload, ranks, micro_steps, steps, limit in (
        ("mostlyvl 8K", MOSTLYVL_8K, 1024, 16, 2, 0.018),
        ("mostlyvl 8K", MOSTLYVL_8K, 256, 4, 16, 0.035),
        ("text80 8K", TEXT80_8K, 1024, 16, 2, 0.08),
        ("mostlyvl 32K quadratic, W=16,384", MOSTLYVL_32K, 256, 16, 2, 0.004),
    ):
        grid = Grid(dp_size=ranks, micro_steps=micro_steps)
        pools = _pools(workload, grid, steps, "1")
        found = simulate(
            pools, relative_time(pools["lbf"], 1), scenario(grid), num_steps=steps, curve=False
        )
        value = found.outcome("balanced").idle_lockstep
        others = [percent(found.outcome(n).idle_lockstep) for n in ("arrival", "two_pass")]
        checks.append(
            Check(
                what=f"idle, lockstep: {name}, R={ranks} G={micro_steps}",
                target=percent(limit),
                found=percent(value, 2),
                good=round(value, 4) <= limit,
                detail=f"unbalanced {others[0]}, lbf in two passes {others[1]}",
            )
        )
    return checks


def _pools(workload: Workload, grid: Grid, steps: int, ratio: str) -> dict[str, PackPool]:
    return {
        "lbf": workload.pool("lbf", grid, steps),
        "balanced": _balanced(workload, grid, steps, ratio),
    }


def _balanced(workload: Workload, grid: Grid, steps: int, ratio: str) -> PackPool:
    return workload.pool(
        "balanced",
        grid,
        steps,
        llm_vit_ratio=ratio,
        reference_ranks=grid.dp_size,
        reference_micro_steps=grid.micro_steps,
    )


def goodput() -> list[Check]:
    """Fill x (1 - idle) in lockstep: tokens that a rank's time is used for."""
    grid = Grid(dp_size=256, micro_steps=16)
    checks = []
    for name, workload in (
        ("text80 8K", TEXT80_8K),
        ("mostlyvl 8K", MOSTLYVL_8K),
        ("gravity 32K quadratic", GRAVITY),
    ):
        lbf = workload.pool("lbf", grid, 1)
        gains = {}
        for ratio in RATIOS:
            pools = {"lbf": lbf, "balanced": _balanced(workload, grid, 1, ratio)}
            found = simulate(
                pools,
                relative_time(lbf, float(ratio)),
                scenario(grid),
                num_steps=1,
                curve=False,
            )
            one, other = (found.outcome(s) for s in ("two_pass", "balanced"))
            before, after = (o.fill * (1 - o.idle_lockstep) for o in (one, other))
            gains[ratio] = after / before - 1
        least = min(gains, key=lambda ratio: gains[ratio])
        shown = ", ".join(f"{ratio}: {100 * gain:+.2f} %" for ratio, gain in gains.items())
        checks.append(
            Check(
                what=f"goodput of balanced over lbf, {name}",
                target="never lower",
                found=f"{100 * gains[least]:+.2f} % at {least}",
                good=gains[least] >= 0,
                detail=f"by LLM-to-ViT ratio {shown}",
            )
        )
    return checks


# ---- the whole chain -----------------------------------------------------------------------------


def chain() -> list[Check]:
    checks = []
    for packer, least in (("lbf", 200_000), ("balanced", 80_000)):
        rates = {m: _rate(w, packer) for m, w in (("mostlyvl", MOSTLYVL_8K), ("text80", TEXT80_8K))}
        slowest = min(rates, key=lambda mix: rates[mix])
        checks.append(
            Check(
                what=f"order, window, pack and balance with {packer}, samples/s a core",
                target=f"{least:,}",
                found=f"{rates[slowest]:,.0f}",
                good=rates[slowest] >= least,
                detail=", ".join(f"{mix} {rate:,.0f}" for mix, rate in rates.items()),
            )
        )
    small, large = (_first_step_s(size) for size in (10_000, 10 * MILLION))
    checks.append(
        Check(
            what="first step, index of 10 million samples over one of 10 thousand",
            target="2.0",
            found=f"{large / small:.2f}",
            good=large <= 2 * small,
            detail=f"{1000 * large:.0f} and {1000 * small:.0f} ms",
        )
    )
    seconds = _seek_s()
    checks.append(
        Check(
            what="seek to step 1,000,000 with a cursor (32 packs a step, endless run)",
            target="1.0 s",
            found=f"{seconds:.2f} s",
            good=seconds < 1,
        )
    )
    return checks


def _rate(workload: Workload, packer: str) -> float:
    """Samples a second over the first three rounds of windows, each planned and placed once."""
    index = workload.index()
    settings = workload.settings(index, packer=packer)
    warm = Plan(settings, index)
    warm.step(warm.start(), Grid(dp_size=8, micro_steps=4))
    plan = Plan(settings, index)
    grid = Grid(dp_size=1024, micro_steps=4)
    homes = [lane % (grid.dp_size // PER_NODE) for lane in range(plan.num_lanes)]
    round_packs = plan.num_lanes * warm.window(0, 0).num_packs
    cursor = plan.start()
    samples, seconds = 0, 0.0
    for _ in range(3 * round_packs // grid.num_packs):
        started = time.process_time()
        step = plan.step(cursor, grid, homes, ranks_per_node=PER_NODE)
        seconds += time.process_time() - started
        assert step is not None
        samples += _samples_in(plan, step)
        cursor = step.next_cursor
    return samples / seconds


def _samples_in(plan: Plan, step: StepPlan) -> int:
    """Those of its packs; none is longer than a pack, so each is one item."""
    total = 0
    for lane, window in set(zip(step.lane.tolist(), step.window.tolist(), strict=True)):
        numbers = step.number[(step.lane == lane) & (step.window == window)]
        total += int(np.diff(plan.window(lane, window).item_offsets)[numbers].sum())
    return total


def _first_step_s(num_samples: int) -> float:
    """From the settings to the first step, with a new plan each time."""
    workload = Workload(
        mix="text80", pack_length=8192, megapixels=4, cost="vit_cost", window=512, lanes=4
    )
    grid = Grid(dp_size=8, micro_steps=4)

    def first_step() -> None:
        index = workload.index(num_samples)
        plan = Plan(workload.settings(index), index)
        assert plan.step(plan.start(), grid) is not None

    return median_s(first_step)


def _seek_s() -> float:
    """From the settings to step 1,000,000 of an endless run, with a new plan each time."""
    workload = TEXT80_8K
    grid = Grid(dp_size=8, micro_steps=4)
    index = workload.index(10 * MILLION)
    shares = tuple(
        SourceShare(name=stats.name, weight=str(sum(stats.shard_samples)))
        for stats in index.sources
    )
    settings = workload.settings(index, sources=shares, epochs=None)
    packs = MILLION * grid.num_packs
    plan = Plan(settings, index)
    per_window = plan.window(0, 0).num_packs
    cursor = Cursor(
        step=MILLION,
        phase=0,
        next_pack=(packs,),
        lanes=((packs // (plan.num_lanes * per_window), per_window // 2),) * plan.num_lanes,
        next_lane=(0,),
    )

    def seek() -> None:
        assert Plan(settings, index).step(cursor, grid) is not None

    return median_s(seek)
