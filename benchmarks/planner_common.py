"""What the sections of benchmarks/planner.py share: tables, checks, timing, synthetic data.

Invariants: the same samples for every packer of a table; one thread on one core; times are CPU time
of this process, medians after a warm-up, so that other programs on the machine weigh little.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import SampleMeasures, measure, sum_groups
from dataservice.core.packing import PackRules, pack
from dataservice.core.settings import BalanceSettings, Grid, PlanSettings, SourceShare
from dataservice.core.simulate import PackTime, Scenario
from dataservice.core.simulate.pool import PackPool, pool_of
from dataservice.core.simulate.workloads import MEGAPIXEL, SyntheticIndex, draw, vision

Ints = NDArray[np.int64]

P_REF = 4096
REPEATS = 5
ENDLESS_SAMPLES = 20_000_000
"""Of an index from which a plan takes only the beginning."""


@dataclass(kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: Sequence[str] = ()

    def text(self) -> str:
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        out = [self.title, "-" * len(self.title)]
        for line in lines:
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            out.append("  ".join(cells).rstrip())
        for note in self.notes:
            out += textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One figure to reach."""

    what: str
    target: str
    found: str
    good: bool
    detail: str = ""


# ---- samples and packs without a plan ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One value a pack, and what it took to make them."""

    pack_length: int
    num_samples: int
    tokens: Ints
    image_tokens: Ints
    cost: Ints
    seconds: float

    @property
    def fill(self) -> float:
        return float(self.tokens.sum()) / (len(self.tokens) * self.pack_length)

    @property
    def cost_cv(self) -> float:
        return float(self.cost.std() / self.cost.mean())

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.num_samples / self.seconds


def shuffled(mix: str, count: int, pack_length: int, megapixels: int) -> SampleMeasures:
    max_pixels = megapixels * MEGAPIXEL
    columns = draw(mix, count, pack_length=pack_length, max_pixels=max_pixels)
    return measure(columns, rules=vision(max_pixels))


def taken(samples: SampleMeasures, where: slice | NDArray[np.bool_]) -> SampleMeasures:
    """Some of the samples."""
    names = (field.name for field in dataclasses.fields(SampleMeasures))
    return SampleMeasures(**{name: getattr(samples, name)[where] for name in names})


def vit_cost(samples: SampleMeasures) -> Ints:
    return P_REF * samples.num_patches + samples.patches_squared


def packed(
    samples: SampleMeasures, rules: PackRules, window: int, *, by: str = "vit_cost"
) -> Packed:
    """In closed windows of `window` samples. `by`: what nbin and balanced even out."""
    vit = vit_cost(samples)
    cost = vit if by == "vit_cost" else samples.image_tokens
    parts: list[tuple[Ints, Ints, Ints]] = []
    seconds = 0.0
    for first in range(0, len(samples.length), window):
        here = slice(first, first + window)
        of = taken(samples, here)
        weight = np.ascontiguousarray(cost[here])
        started = time.process_time()
        found = pack(of.length, of.image_tokens, of.num_patches, of.num_images, weight, rules)
        seconds += time.process_time() - started
        order, offsets = found.order, found.offsets
        parts.append(
            (
                sum_groups(of.length[order], offsets),
                sum_groups(of.image_tokens[order], offsets),
                sum_groups(vit[here][order], offsets),
            )
        )
    tokens, images, costs = (np.concatenate(values) for values in zip(*parts, strict=True))
    return Packed(
        pack_length=rules.pack_length,
        num_samples=len(samples.length),
        tokens=tokens,
        image_tokens=images,
        cost=costs,
        seconds=seconds,
    )


# ---- packs of a plan -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A mix and the plan's settings for it."""

    mix: str
    pack_length: int
    megapixels: int
    cost: str
    window: int
    lanes: int

    def index(self, num_samples: int = ENDLESS_SAMPLES) -> SyntheticIndex:
        return SyntheticIndex(
            self.mix,
            num_samples=num_samples,
            pack_length=self.pack_length,
            max_pixels=self.megapixels * MEGAPIXEL,
        )

    def settings(self, index: SyntheticIndex, **changes: Any) -> PlanSettings:
        values: dict[str, Any] = {
            "sources": tuple(SourceShare(name=stats.name) for stats in index.sources),
            "pack_length": self.pack_length,
            "cost": self.cost,
            "p_ref": P_REF,
            "lanes": self.lanes,
            "window": self.window,
            "vision": vision(self.megapixels * MEGAPIXEL),
            "balance": BalanceSettings(),
        }
        return PlanSettings(**(values | changes))

    def pool(self, packer: str, grid: Grid, num_steps: int, **changes: Any) -> PackPool:
        index = self.index()
        return pool_of(self.settings(index, **changes), index, packer, grid, num_steps)


TEXT80_8K = Workload(
    mix="text80", pack_length=8192, megapixels=4, cost="image_tokens", window=4096, lanes=32
)
MOSTLYVL_8K = Workload(
    mix="mostlyvl", pack_length=8192, megapixels=4, cost="image_tokens", window=4096, lanes=32
)
MOSTLYVL_32K = Workload(
    mix="mostlyvl", pack_length=32_768, megapixels=4, cost="vit_cost", window=16_384, lanes=8
)
GRAVITY = Workload(
    mix="gravity", pack_length=32_768, megapixels=16, cost="vit_cost", window=16_384, lanes=8
)


def scenario(grid: Grid, *, ranks_per_node: int = 8, node_gbits: float = 100.0) -> Scenario:
    return Scenario(
        grids=(grid,),
        ranks_per_node=min(ranks_per_node, grid.dp_size),
        sync_domain=grid.dp_size,
        tolerance=0.01,
        min_images_per_rank=0,
        node_gbits=node_gbits,
        token_bytes=8,
        patch_bytes=3 * 16 * 16,
    )


def relative_time(pool: PackPool, ratio: float) -> PackTime:
    """A mean lbf pack's ViT takes 1, a pack's LLM `ratio`."""
    return PackTime(pack_ms=ratio, unit_ms=1 / float(pool.all("cost").mean()))


# ---- timing and the machine ----------------------------------------------------------------------


def median_s(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Of `repeats` runs after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def use_one_core() -> int:
    """Pins the process to the last core it may use; its number."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def environment(core: int) -> dict[str, str]:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "numba"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, load {os.getloadavg()[0]:.2f} at the start; run on core {core} "
        "alone",
        "versions": ", ".join(versions),
    }


def plus(gain: float) -> str:
    return f"{100 * gain:+.1f} %"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"
