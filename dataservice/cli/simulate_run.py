"""Runs the comparisons that `dataservice simulate` shows: one in full, and one a row of a sweep.

Invariants: nothing is printed, started or decoded; a row of a sweep has the times of the full
comparison, and its balanced packs are made for the same grid; packs are made once for each setting,
whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dataservice.cli.index_view import open_index
from dataservice.cli.progress import Show, no_progress
from dataservice.config import load_config
from dataservice.core.fitted import FittedCost
from dataservice.core.limits import LARGEST
from dataservice.core.order.window_size import AUTO_WINDOW_PACKS, MAX_AUTO_LANES
from dataservice.core.packspec import TOKEN_BYTES
from dataservice.core.plan.check import check_settings, check_step, kind_grids
from dataservice.core.settings import Grid, PlanSettings, Segregation, SourceShare
from dataservice.core.simulate import (
    STRATEGIES,
    PackTime,
    Scenario,
    Simulation,
    simulate,
)
from dataservice.core.simulate.pool import PACKERS, PackPool, pool_of
from dataservice.core.simulate.workloads import MIXES, SyntheticIndex, mix_named, vision
from dataservice.core.tables import IndexView
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

DEFAULT_VIT_MS = 0.84
"""Of an image token, forward and backward: a public report (NAVER) has 200 ms forward for 500 and
900 ms for 3,000 tokens, 0.28 ms for each further one; a backward pass takes about twice as long."""
DEFAULT_NODE_GBITS = 100.0
DEFAULT_RANKS_PER_NODE = 8
SWEEPS = ("dp_size", "pack_length", "max_pixels", "max_tiles", "open_bins")
_WINDOW_PACKS = AUTO_WINDOW_PACKS
"""Of a synthetic plan's windows, at about a thousand tokens a sample or more."""
LEAST_GIVEN, MOST_GIVEN = 1e-9, 1e9
"""Of a time in milliseconds that is not 0, and of Gbit/s."""
NO_VIT_LLM_MS = 1.0
"""Of a pack where no image costs anything and no LLM time is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is simulated: a config's plan on its index, or a synthetic mix."""

    name: str
    settings: PlanSettings
    index_of: Callable[[PlanSettings], IndexView]
    ranks_per_node: int
    """0: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """As given on the command line; None where nothing was."""

    grid: Grid
    steps: int = 1
    llm_ms: float | None = None
    vit_ms_per_token: float | None = None
    fitted: FittedCost | None = None
    ranks_per_node: int | None = None
    node_gbits: float = DEFAULT_NODE_GBITS
    sweep: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """ConfigError for sizes and times that nothing can be told from."""
        for dp_size in (self.grid.dp_size, *self.sweep.get("dp_size", ())):
            check_step(dataclasses.replace(self.grid, dp_size=dp_size))
        for option, value in (
            ("--llm-ms", self.llm_ms),
            ("--vit-ms-per-token", self.vit_ms_per_token),
            ("--node-gbits", self.node_gbits),
        ):
            if value and not LEAST_GIVEN <= value <= MOST_GIVEN:
                raise ConfigError(
                    f"{option} {value:g}: should be from {LEAST_GIVEN:g} to {MOST_GIVEN:g}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    values: Mapping[str, int]
    simulation: Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that the table, the JSON and the page show."""

    workload: str
    options: Options
    settings: PlanSettings
    """Of the full comparison."""
    simulation: Simulation
    rows: tuple[SweepRow, ...]
    num_phases: int
    """Of the plan; the first is simulated."""
    warnings: tuple[str, ...]


def workload_of(config: str | None, synthetic: str | None, options: Options) -> Workload:
    """ConfigError unless exactly one is given, or for a mix that does not exist."""
    if (config is None) == (synthetic is None):
        raise ConfigError(
            "simulate: give either a CONFIG or --synthetic with one of "
            f"{', '.join(MIXES)}, and not both"
        )
    if config is not None:
        loaded = load_config(config)
        index = open_index(loaded)
        return Workload(
            name=loaded.job,
            settings=loaded.plan,
            index_of=lambda _: index,
            ranks_per_node=loaded.ranks_per_node,
        )
    assert synthetic is not None
    mix = mix_named(synthetic)
    most = max(options.grid.dp_size, *options.sweep.get("dp_size", (1,)))
    num_packs = options.steps * dataclasses.replace(options.grid, dp_size=most).num_packs
    lanes = 1
    while lanes < MAX_AUTO_LANES and 2 * lanes * _WINDOW_PACKS <= num_packs:
        lanes *= 2

    def index_of(settings: PlanSettings) -> SyntheticIndex:
        return SyntheticIndex(
            synthetic,
            num_samples=max(2 * num_packs, 4 * lanes * _WINDOW_PACKS)
            * settings.pack_length
            // 1000,
            pack_length=settings.pack_length,
            max_pixels=settings.vision.max_pixels,
        )

    settings = PlanSettings(
        sources=(),
        packer="lbf",
        pack_length=mix.pack_length,
        vision=vision(mix.max_pixels),
        lanes=lanes,
    )
    sources = tuple(SourceShare(name=stats.name) for stats in index_of(settings).sources)
    return Workload(
        name=f"synthetic {synthetic}",
        settings=dataclasses.replace(settings, sources=sources),
        index_of=index_of,
        ranks_per_node=0,
    )


def parse_sweep(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Reads "dp_size=64,256" and the like, one setting each."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in SWEEPS:
            raise ConfigError(
                f"--sweep {text}: {name!r} is not swept; NAME=VALUE,VALUE with one of "
                f"{', '.join(SWEEPS)}"
            )
        if name in found:
            raise ConfigError(f"--sweep {text}: {name} is given twice; give all values in one list")
        try:
            numbers = tuple(dict.fromkeys(int(value) for value in values.split(",")))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            raise ConfigError(
                f"--sweep {text}: values must be whole numbers of at least 1, such as {name}=1,2,4"
            )
        if name in LARGEST and max(numbers) > LARGEST[name]:
            raise ConfigError(f"--sweep {name}={max(numbers)}: should be at most {LARGEST[name]:,}")
        found[name] = numbers
    return found


def run(workload: Workload, options: Options, show: Show = no_progress) -> Report:
    """ConfigError for settings that cannot be simulated; `show` hears what is being done, and how
    many of the packings are done."""
    settings = _settings(workload, options)
    compared = tuple(dict.fromkeys(packer for packer, _ in STRATEGIES.values()))
    combinations = list(_combinations(options.sweep))
    num_packings = len(PACKERS) + len(combinations) * len(compared)
    runner = _Runner(workload, options, settings, show, num_packings)
    full = runner.simulation(settings, options.grid.dp_size, tuple(PACKERS), curve=True)
    rows = []
    for values in combinations:
        dp_size = values.get("dp_size", options.grid.dp_size)
        swept = runner.simulation(_with(settings, values), dp_size, compared, curve=False)
        rows.append(SweepRow(values=values, simulation=swept))
    return Report(
        workload=workload.name,
        options=options,
        settings=settings,
        simulation=full,
        rows=tuple(rows),
        num_phases=max(1, len(workload.settings.phases)),
        warnings=tuple(dict.fromkeys(runner.warnings)),
    )


def _combinations(sweep: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    if sweep:
        for values in itertools.product(*sweep.values()):
            yield dict(zip(sweep, values, strict=True))


# ---- settings -----------------------------------------------------------------------------------


def _settings(workload: Workload, options: Options) -> PlanSettings:
    """The plan's first phase, with the cost that was asked for."""
    settings = workload.settings
    check_settings(settings)
    if settings.phases:
        phase = settings.phases[0]
        weights = dict(phase.weights or ())
        settings = dataclasses.replace(
            settings,
            phases=(),
            pack_length=phase.pack_length or settings.pack_length,
            packer=phase.packer or settings.packer,
            vision=phase.rules(settings.vision),
            sources=tuple(
                dataclasses.replace(source, weight=weights.get(source.name, "0"))
                for source in settings.sources
            )
            if weights
            else settings.sources,
            segregate=_by_the_sources(settings.segregate) if weights else settings.segregate,
        )
    if options.fitted is not None:
        settings = dataclasses.replace(settings, cost="fitted", fitted=options.fitted)
    if settings.cost == "fitted" and (options.llm_ms, options.vit_ms_per_token) != (None, None):
        raise ConfigError(
            "--llm-ms and --vit-ms-per-token: the cost is fitted from measured times, which give "
            "a pack's whole time; leave them out, or the fitted cost"
        )
    return settings


def _by_the_sources(segregate: Segregation | None) -> Segregation | None:
    """Without weights of the kinds' own, as in a phase that gives weights."""
    if segregate is None:
        return None
    return Segregation(
        text=dataclasses.replace(segregate.text, weights=None),
        vision=dataclasses.replace(segregate.vision, weights=None),
    )


def _with(settings: PlanSettings, values: Mapping[str, int]) -> PlanSettings:
    return dataclasses.replace(
        settings,
        pack_length=values.get("pack_length", settings.pack_length),
        open_bins=values.get("open_bins", settings.open_bins),
        vision=_with_limit(settings.vision, values),
    )


def _with_limit(vision: VisionRules, values: Mapping[str, int]) -> VisionRules:
    own, other = ("tiles", "pixels") if vision.mode == "tiles" else ("pixels", "tiles")
    if f"max_{other}" in values:
        raise ConfigError(
            f"--sweep max_{other}={values[f'max_{other}']}: says nothing where vision.mode is "
            f"{vision.mode}; sweep max_{own}"
        )
    limit, least = values.get(f"max_{own}", vision.limit), getattr(vision, f"min_{own}")
    if limit < least:
        raise ConfigError(f"--sweep max_{own}={limit}: is below min_{own}, {least}")
    return vision.with_limit(limit)


class _Runner:
    """Compares; packs are made once by settings and packer, for the most ranks asked for."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        base: PlanSettings,
        show: Show,
        num_packings: int,
    ) -> None:
        self.warnings: list[str] = []
        self._workload = workload
        self._options = options
        self._base = base
        self._show = show
        self._num_done, self._num_packings = 0, num_packings
        sizes = (options.grid.dp_size, *options.sweep.get("dp_size", ()))
        self._unit = dataclasses.replace(options.grid, dp_size=math.gcd(*sizes))
        self._num_units = options.steps * max(sizes) // self._unit.dp_size
        self._made: dict[tuple[PlanSettings, str], PackPool] = {}

    def simulation(
        self, settings: PlanSettings, dp_size: int, packers: Sequence[str], *, curve: bool
    ) -> Simulation:
        scenario = self._scenario(settings, dp_size)
        lbf = self._pool(settings, "lbf")
        self._whole_steps(settings, [lbf], scenario)
        time = self._time(settings)
        pools = {}
        for name in packers:
            for_it = self._for_times(settings, time, lbf) if name == "balanced" else settings
            pools[name] = self._pool(for_it, name)
            self._num_done += 1
            self._show(self._num_done, self._num_packings, "comparing")
        num_steps = self._whole_steps(settings, list(pools.values()), scenario)
        if num_steps < self._options.steps:
            self.warnings.append(
                f"the data ends after {num_steps} whole steps of {scenario.num_packs:,} packs; "
                f"{self._options.steps} were asked for"
            )
        return simulate(pools, time, scenario, num_steps=num_steps, curve=curve)

    def _pool(self, settings: PlanSettings, packer: str) -> PackPool:
        if (settings, packer) not in self._made:
            said = f"packing {settings.pack_length:,} tokens a pack: {packer}"
            self._show(self._num_done, self._num_packings, said)
            index = self._workload.index_of(settings)
            self._made[settings, packer] = pool_of(
                settings, index, packer, self._unit, self._num_units
            )
        return self._made[settings, packer]

    def _whole_steps(
        self, settings: PlanSettings, pools: Sequence[PackPool], scenario: Scenario
    ) -> int:
        found = min(pool.steps(scenario.grids) for pool in pools)
        if found == 0:
            one_rank = dataclasses.replace(self._unit, dp_size=1)
            index = self._workload.index_of(settings)
            whole = pool_of(settings, index, "lbf", one_rank, scenario.dp_size)
            raise ConfigError(
                "the data ends before a step is full: it makes about "
                f"{len(whole.all('cost')):,} packs, and a step of {scenario.dp_size:,} ranks x "
                f"{scenario.micro_steps:,} micro-steps takes {scenario.num_packs:,}; choose a "
                "smaller --dp-size or --micro-steps, or more data or epochs"
            )
        return min(found, self._options.steps)

    def _scenario(self, settings: PlanSettings, dp_size: int) -> Scenario:
        options = self._options
        usual = self._workload.ranks_per_node or DEFAULT_RANKS_PER_NODE
        ranks_per_node = options.ranks_per_node or math.gcd(usual, dp_size)
        if dp_size % ranks_per_node:
            raise ConfigError(
                f"--ranks-per-node: {ranks_per_node} does not divide the DP size, {dp_size}; "
                "choose one that does, or another DP size"
            )
        return Scenario(
            grids=kind_grids(settings, dataclasses.replace(options.grid, dp_size=dp_size)),
            ranks_per_node=ranks_per_node,
            sync_domain=settings.balance.sync_domain or dp_size,
            tolerance=settings.balance.tolerance,
            min_images_per_rank=settings.balance.min_images_per_rank,
            node_gbits=options.node_gbits,
            token_bytes=TOKEN_BYTES,
            patch_bytes=settings.vision.patch_bytes,
        )

    def _time(self, settings: PlanSettings) -> PackTime:
        """As the full comparison has it; what all packs take alike goes with their length."""
        longer = settings.pack_length / self._base.pack_length
        base = self._base_time
        return dataclasses.replace(base, pack_ms=base.pack_ms * longer)

    @functools.cached_property
    def _base_time(self) -> PackTime:
        options, settings = self._options, self._base
        if settings.cost == "fitted" and settings.fitted is not None:
            return PackTime(pack_ms=settings.fitted.constant_fs * 1e-12, unit_ms=1e-6)
        grids = self._scenario(settings, options.grid.dp_size).grids
        pool = self._pool(settings, "lbf").first(grids, options.steps)
        per_token = DEFAULT_VIT_MS if options.vit_ms_per_token is None else options.vit_ms_per_token
        cost = float(pool.all("cost").sum())
        vit_ms = per_token * float(pool.all("image_tokens").sum())
        unit = vit_ms / cost if cost > 0 else 0.0
        if options.llm_ms is None:
            mean = vit_ms / max(1, len(pool.all("cost")))
            return PackTime(pack_ms=mean or NO_VIT_LLM_MS, unit_ms=unit)
        if options.llm_ms == 0 and vit_ms == 0:
            raise ConfigError(
                "--llm-ms 0: then nothing takes time, for the vision encoder has none"
            )
        return PackTime(pack_ms=options.llm_ms, unit_ms=unit)

    def _for_times(self, settings: PlanSettings, time: PackTime, pool: PackPool) -> PlanSettings:
        """What `balanced` packs for: the plan's own if it is its packer, else what is simulated."""
        vit = time.unit_ms * float(pool.all("cost").mean())
        if settings.packer == "balanced" or vit == 0:
            return settings
        return dataclasses.replace(
            settings,
            llm_vit_ratio=f"{min(max(time.pack_ms / vit, 0.001), 1000.0):.3f}",
            reference_ranks=self._options.grid.dp_size,
            reference_micro_steps=self._options.grid.micro_steps,
        )
