"""What a run would wait for, from costs alone: packers and placements compared on the same data.

Invariants: a pure function of (index, settings, scenario); nothing here decides a plan, so times
are floats; every strategy gets the same samples and the same model of a pack's time. The present,
which others are compared to, is `arrival`: lbf packs on ranks in the order they come.

Model. A pack takes `pack_ms` plus `unit_ms` for each unit of its cost. Under lockstep, ranks that
meet at every micro-step wait for the slowest of each; at the end of a step all wait for the largest
total. Idle share = 1 - (mean rank's work) / (time of the step), padding packs not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance import arrival, assign
from dataservice.core.settings import Grid
from dataservice.core.simulate.pool import PackPool, Packs, joined
from dataservice.core.simulate.traffic import Traffic, exposed_ms, mean_traffic, traffic_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Placement = Literal["arrival", "local", "two_pass"]

STRATEGIES: dict[str, tuple[str, Placement]] = {
    "arrival": ("lbf", "arrival"),
    "local": ("lbf", "local"),
    "budget_2d": ("budget_2d", "arrival"),
    "nbin_v1": ("nbin_v1", "arrival"),
    "nbin_v2": ("nbin_v2", "arrival"),
    "two_pass": ("lbf", "two_pass"),
    "balanced": ("balanced", "two_pass"),
}
"""Name -> (packer, placement). local: each rank reorders its own packs."""

_CURVE_STEPS = 16
_LEAST_RANKS = 8
_BINS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class PackTime:
    """Milliseconds of a pack, forward and backward together."""

    pack_ms: float
    """Of every pack alike: the LLM's, or what a fitted model has as its constant."""
    unit_ms: float
    """Of one unit of cost."""

    def of(self, cost: Ints) -> Floats:
        return self.pack_ms + self.unit_ms * cost.astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Who computes, what meets, and how fast packs could travel."""

    grids: tuple[Grid, ...]
    """Of each kind, all with the same ranks."""
    ranks_per_node: int
    sync_domain: int
    """Ranks that meet at every micro-step."""
    tolerance: float
    """Of the two-pass balance, as is the next."""
    min_images_per_rank: int
    node_gbits: float
    """Gbit/s of one node's network, each way."""
    token_bytes: int
    patch_bytes: int

    @property
    def dp_size(self) -> int:
        return self.grids[0].dp_size

    @property
    def micro_steps(self) -> int:
        """Of all kinds."""
        return sum(grid.micro_steps for grid in self.grids)

    @property
    def num_packs(self) -> int:
        """Of a step."""
        return sum(grid.num_packs for grid in self.grids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One strategy; times, bytes and packs are means of a step."""

    strategy: str
    packer: str
    fill: float
    idle_lockstep: float
    idle_end: float
    idle_sync: float
    """At the scenario's sync domain, as are the values below."""
    step_ms: float
    tokens_per_s: float
    gain: float
    """Tokens per second over those of `arrival`, less 1."""
    traffic: Traffic
    """Of a redistribution after loading, had each rank loaded its packs of arrival order."""
    exposed_ms: float
    """What it adds to a step when no rank computes meanwhile."""
    exposed_overlap_ms: float
    """What it adds when the next micro-step's packs travel while this one is computed."""
    gain_exposed: float
    gain_overlap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackerSummary:
    packer: str
    num_packs: int
    fill: float
    mean_ms: float
    cost_cv: float
    """Standard deviation over mean of the packs' cost; 0 where all cost nothing."""
    cost_max: float
    """Over the mean."""
    histogram: Ints
    """Packs by time, over `Simulation.edges_ms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    scenario: Scenario
    pack_length: int
    num_steps: int
    time: PackTime
    mean_vit_ms: float
    """Of an lbf pack: its time without `pack_ms`."""
    outcomes: tuple[Outcome, ...]
    packers: tuple[PackerSummary, ...]
    edges_ms: Floats
    ranks: tuple[int, ...]
    idle_by_ranks: Mapping[str, tuple[float, ...]]
    """Strategy -> idle share at the sync domain, for each of `ranks`."""
    cells_ms: Mapping[str, Floats]
    """Strategy -> [micro-step, rank] times of the first step, of arrival and the last strategy."""
    counts: Mapping[str, Mapping[str, int]]

    def outcome(self, strategy: str) -> Outcome:
        return next(o for o in self.outcomes if o.strategy == strategy)


# ---- the comparison -----------------------------------------------------------------------------


def simulate(
    pools: Mapping[str, PackPool],
    time: PackTime,
    scenario: Scenario,
    *,
    num_steps: int,
    curve: bool = True,
) -> Simulation:
    """Compare all strategies whose packer is among `pools`, `arrival` always, on `num_steps` steps.

    `pools` by names of PACKERS, with packs enough for the steps. `curve`: also at fewer ranks.
    """
    used = {name: pool.first(scenario.grids, num_steps) for name, pool in pools.items()}
    steps = {
        name: _Steps(used[packer], time, scenario, placement)
        for name, (packer, placement) in STRATEGIES.items()
        if packer in used
    }
    outcomes: list[Outcome] = []
    for name, of in steps.items():
        outcomes.append(of.outcome(name, outcomes[0] if outcomes else None))
    ranks = _fewer_ranks(scenario.dp_size) if curve else ()
    edges = _edges(used, time)
    return Simulation(
        scenario=scenario,
        pack_length=used["lbf"].pack_length,
        num_steps=num_steps,
        time=time,
        mean_vit_ms=float(time.unit_ms * used["lbf"].all("cost").mean()),
        outcomes=tuple(outcomes),
        packers=tuple(_summary(name, pool, time, edges) for name, pool in used.items()),
        edges_ms=edges,
        ranks=ranks,
        idle_by_ranks={
            name: tuple(_idle_at(r, used[packer], time, scenario, placement) for r in ranks)
            for name, (packer, placement) in (STRATEGIES.items() if curve else ())
            if packer in used
        },
        cells_ms={name: steps[name].cells[0] for name in ("arrival", list(steps)[-1])},
        counts=used["lbf"].counts,
    )


class _Steps:
    """All whole steps of a pool in one placement."""

    def __init__(
        self, pool: PackPool, time: PackTime, scenario: Scenario, placement: Placement
    ) -> None:
        self._pool = pool
        self._scenario = scenario
        self._steps = [
            _step(pool, time, scenario, placement, number)
            for number in range(pool.steps(scenario.grids))
        ]
        self.cells = np.array([step.cells for step in self._steps])
        """[step, micro-step, rank] milliseconds."""

    def idle(self, sync_domain: int) -> float:
        return idle_share(self.cells, sync_domain)

    def outcome(self, strategy: str, present: Outcome | None) -> Outcome:
        scenario = self._scenario
        step_ms = float(step_times(self.cells, scenario.sync_domain).mean())
        traffic = [step.traffic for step in self._steps]
        exposed = [
            exposed_ms(step.cells.max(axis=1), step.traffic.busiest_node_bytes, scenario.node_gbits)
            for step in self._steps
        ]
        alone, overlapped = (float(np.mean(values)) for values in zip(*exposed, strict=True))
        tokens = float(self._pool.all("tokens").sum()) / len(self._steps)
        speeds = [
            1000 * tokens / (step_ms + extra) if step_ms > 0 else 0.0
            for extra in (0.0, alone, overlapped)
        ]
        base = speeds[0] if present is None else present.tokens_per_s
        gains = [speed / base - 1 if base > 0 else 0.0 for speed in speeds]
        return Outcome(
            strategy=strategy,
            packer=STRATEGIES[strategy][0],
            fill=_fill(self._pool),
            idle_lockstep=self.idle(scenario.dp_size),
            idle_end=self.idle(1),
            idle_sync=self.idle(scenario.sync_domain),
            step_ms=step_ms,
            tokens_per_s=speeds[0],
            gain=gains[0],
            traffic=mean_traffic(traffic),
            exposed_ms=alone,
            exposed_overlap_ms=overlapped,
            gain_exposed=gains[1],
            gain_overlap=gains[2],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    cells: Floats
    traffic: Traffic


def _step(
    pool: PackPool, time: PackTime, scenario: Scenario, placement: Placement, number: int
) -> _Step:
    """Its kinds one after the other."""
    micro_steps, ranks, homes, packs = [], [], [], []
    before = 0
    for kind, grid in zip(pool.kinds, scenario.grids, strict=True):
        taken = kind.part(number * grid.num_packs, (number + 1) * grid.num_packs)
        home = _home(grid, scenario)
        micro_step, rank = _place(placement, taken, home, grid, scenario)
        micro_steps.append(micro_step + before)
        ranks.append(rank)
        homes.append(home)
        packs.append(taken)
        before += grid.micro_steps
    step = joined(packs)
    micro_step, rank = np.concatenate(micro_steps), np.concatenate(ranks)
    shape = (scenario.micro_steps, scenario.dp_size)
    cells = np.zeros(shape)
    np.add.at(cells, (micro_step, rank), time.of(step.cost))
    return _Step(
        cells=cells,
        traffic=traffic_of(
            step.num_patches * scenario.patch_bytes + pool.pack_length * scenario.token_bytes,
            np.concatenate(homes),
            rank // scenario.ranks_per_node,
            micro_step,
            micro_steps=shape[0],
            num_nodes=shape[1] // scenario.ranks_per_node,
        ),
    )


def step_times(cells: Floats, sync_domain: int) -> Floats:
    """[steps] milliseconds: the largest sum, over sync domains, of their micro-steps' maxima.

    `cells` [steps, micro-steps, ranks]; the domain divides the ranks: all of them is lockstep, 1
    waits at the end of the step only.
    """
    steps, micro_steps, ranks = cells.shape
    domains = cells.reshape(steps, micro_steps, ranks // sync_domain, sync_domain)
    slowest: Floats = domains.max(axis=3).sum(axis=1).max(axis=1)
    return slowest


def idle_share(cells: Floats, sync_domain: int) -> float:
    """Of all ranks' time in the steps; 0 when there is nothing to compute."""
    total = float(step_times(cells, sync_domain).sum())
    return 1 - float(cells.sum()) / cells.shape[2] / total if total > 0 else 0.0


# ---- placements ---------------------------------------------------------------------------------


def _place(
    placement: Placement, packs: Packs, home: Ints, grid: Grid, scenario: Scenario
) -> tuple[Ints, Ints]:
    """(micro-step, rank) of a step's packs of one kind."""
    if placement == "arrival":
        return arrival(grid.num_packs, dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
    if placement == "local":
        return _reordered(packs.cost, grid)
    found = assign(
        packs.cost,
        home,
        dp_size=grid.dp_size,
        micro_steps=grid.micro_steps,
        ranks_per_node=scenario.ranks_per_node,
        sync_domain=scenario.sync_domain,
        tolerance=scenario.tolerance,
        packs_per_cell=grid.packs_per_cell,
        num_images=packs.num_images,
        min_images_per_rank=scenario.min_images_per_rank,
    )
    return found.micro_step, found.dp_rank


def _reordered(cost: Ints, grid: Grid) -> tuple[Ints, Ints]:
    """Each rank computes the packs that arrival order gives it by falling cost."""
    _, rank = arrival(len(cost), dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
    order = np.lexsort((np.arange(len(cost)), -cost, rank))
    micro_step = np.empty_like(rank)
    place = np.arange(len(cost)) % (grid.micro_steps * grid.packs_per_cell)
    micro_step[order] = place // grid.packs_per_cell
    return micro_step, rank


def _home(grid: Grid, scenario: Scenario) -> Ints:
    """The node whose rank has each pack in arrival order."""
    _, rank = arrival(grid.num_packs, dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
    return rank // scenario.ranks_per_node


# ---- what the plots show ------------------------------------------------------------------------


def _fill(pool: PackPool) -> float:
    tokens = pool.all("tokens")
    return float(tokens.sum()) / (len(tokens) * pool.pack_length)


def _edges(pools: Mapping[str, PackPool], time: PackTime) -> Floats:
    largest = max(float(time.of(pool.all("cost")).max()) for pool in pools.values())
    return np.linspace(0.0, largest or 1.0, _BINS + 1)


def _summary(packer: str, pool: PackPool, time: PackTime, edges: Floats) -> PackerSummary:
    cost = pool.all("cost")
    times = time.of(cost)
    mean = float(cost.mean())
    return PackerSummary(
        packer=packer,
        num_packs=len(cost),
        fill=_fill(pool),
        mean_ms=float(times.mean()),
        cost_cv=float(cost.std()) / mean if mean > 0 else 0.0,
        cost_max=float(cost.max()) / mean if mean > 0 else 0.0,
        histogram=np.histogram(times, edges)[0].astype(np.int64),
    )


def _fewer_ranks(dp_size: int) -> tuple[int, ...]:
    """dp_size halved while it is even and above 8, rising."""
    ranks = [dp_size]
    while ranks[-1] % 2 == 0 and ranks[-1] > _LEAST_RANKS:
        ranks.append(ranks[-1] // 2)
    return tuple(reversed(ranks))


def _idle_at(
    ranks: int, pool: PackPool, time: PackTime, scenario: Scenario, placement: Placement
) -> float:
    """Of the same packs on fewer ranks; where the sync domain does not divide them, in lockstep."""
    domain = scenario.sync_domain
    grids = tuple(dataclasses.replace(grid, dp_size=ranks) for grid in scenario.grids)
    at = dataclasses.replace(
        scenario,
        grids=grids,
        sync_domain=domain if ranks % domain == 0 and domain < scenario.dp_size else ranks,
        ranks_per_node=1,
    )
    few = pool.first(grids, min(pool.steps(grids), _CURVE_STEPS))
    return _Steps(few, time, at, placement).idle(at.sync_domain)
