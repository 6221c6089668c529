"""What `dataservice stage` does: copies the shards that some steps read to this node's disk.

Invariants: nothing is started but the copying; what the budget has no room for is named, not
waited for; a shard that cannot be copied is tried three times and then left to be read from its
origin; the summary goes to stdout, progress to stderr.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dataservice.cli.plan_view import ends_before
from dataservice.config import Config, StagingSettings
from dataservice.config.folders import check_writable
from dataservice.core.lanes import lane_nodes
from dataservice.core.packspec import ShardRef
from dataservice.core.plan import Plan
from dataservice.core.plan.run_plan import RunPlan
from dataservice.core.settings import Grid
from dataservice.core.tables import WindowPlan
from dataservice.errors import ConfigError
from dataservice.storage.index import Index
from dataservice.storage.staging import Copiers, Figures, Need, StagingArea

ATTEMPTS = 3
_LOOK_S = 0.2
LINE_S = 10.0
"""Between two lines of progress where stderr is no terminal."""
_SKIPPED_STEPS = 100
"""At once, on the way to the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    steps: tuple[int, int]
    """First, and one past the last."""
    needed_shards: int
    needed_bytes: int
    seconds: float
    figures: Figures

    @property
    def failed_shards(self) -> int:
        return self.figures.missing_shards

    @property
    def staged_shards(self) -> int:
        return self.needed_shards - self.figures.missing_shards - self.figures.read_through_shards


def lanes_of(plan: Plan, nodes: Sequence[str], node: str | None) -> NDArray[np.bool_]:
    """[lanes] Which of them a node stages, when the service runs on `nodes`; all without nodes."""
    name = node or socket.gethostname()
    if "" in nodes:
        raise ConfigError(f"--nodes {','.join(nodes)}: a name is empty; name every data node")
    if not nodes:
        return np.ones(plan.num_lanes, dtype=np.bool_)
    if name not in nodes:
        raise ConfigError(
            f"--nodes {','.join(nodes)}: this node, {name}, is not among them; add it, or say with "
            "--node which of them it is"
        )
    # in the order in which the service deals lanes to its nodes
    ordered = sorted(set(nodes))
    return np.array(lane_nodes(plan.num_lanes, ordered)) == ordered.index(name)


def needs_of_steps(
    run: RunPlan,
    index: Index,
    steps: tuple[int, int],
    lanes: NDArray[np.bool_],
    show: Callable[[str], None],
) -> list[Need]:
    """The shards that the steps' packs of these lanes read, in the order of need."""
    first, stop = steps
    plan, grid = run.plan, run.grid
    found: dict[ShardRef, int] = {}
    cursor = plan.start()
    while cursor.step < first:
        show(f"looking for step {first:,}, at {cursor.step:,}")
        skipped = run.skip(cursor, min(_SKIPPED_STEPS, first - cursor.step))
        if skipped.step == cursor.step:
            break
        cursor = skipped
    for step in range(first, stop):
        show(f"planning step {step:,} of {first:,}:{stop:,}, {len(found):,} shards so far")
        planned = run.step(cursor)
        if planned is None:
            if step == first:
                raise ends_before(first, stop, plan.settings, grid)
            typer.echo(f"the plan ends after step {step - 1}", err=True)
            break
        cursor = planned.next_cursor
        mine = (planned.lane >= 0) & lanes[planned.lane]
        places = np.stack([planned.lane[mine], planned.window[mine]], axis=1)
        for lane, window in np.unique(places, axis=0).tolist():
            packs = planned.number[mine & (planned.lane == lane) & (planned.window == window)]
            for shard in index.shards_of(part_of(plan.window(lane, window), packs)):
                found.setdefault(shard, step - first)
    return [
        Need(shard=shard, crc32=index.shard_crc(shard), next_use=use)
        for shard, use in found.items()
    ]


def part_of(window: WindowPlan, packs: NDArray[np.int64]) -> WindowPlan:
    """The window with the items of some of its packs alone."""
    begins, ends = window.item_offsets[packs], window.item_offsets[packs + 1]
    items = np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)])
    return dataclasses.replace(
        window,
        source=window.source[items],
        row=window.row[items],
        kept_images=window.kept_images[items],
    )


def stage(
    config: Config,
    index: Index,
    *,
    steps: tuple[int, int],
    grid: Grid,
    nodes: Sequence[str] = (),
    node: str | None = None,
) -> Staged:
    """Copies until all that has room is there; shows progress on stderr."""
    cache_dir = _cache_dir(config.staging)
    # which rank a pack goes to does not matter here, and costs time to find
    balance = dataclasses.replace(config.plan.balance, enabled=False)
    plan = Plan(dataclasses.replace(config.plan, balance=balance), index)
    lanes = lanes_of(plan, nodes, node)
    run = RunPlan(plan=plan, grid=grid, exclude=config.exclude)
    with _Progress() as progress:
        needs = needs_of_steps(run, index, steps, lanes, progress.planning)
        begun = time.monotonic()
        with _area(config.staging, cache_dir) as area, Copiers(area):
            area.update(needs)
            while not area.settled(ATTEMPTS):
                progress.copying(area.figures())
                area.wait(_LOOK_S)
            figures = area.figures()
    return Staged(
        steps=steps,
        needed_shards=len(needs),
        needed_bytes=sum(need.shard.content_bytes for need in needs),
        seconds=time.monotonic() - begun,
        figures=figures,
    )


def _cache_dir(staging: StagingSettings) -> str:
    if staging.cache_dir is None:
        raise ConfigError(
            "staging.cache_dir is not set: there is nowhere to stage to; name a folder on the "
            "node's own disk"
        )
    check_writable("staging.cache_dir", staging.cache_dir)
    return staging.cache_dir


def _area(staging: StagingSettings, cache_dir: str) -> StagingArea:
    return StagingArea(
        cache_dir,
        budget_bytes=staging.budget_bytes,
        deadline_s=staging.deadline_s,
        streams=staging.copy_streams,
        max_bytes_per_s=staging.max_bytes_per_s,
    )


class _Progress:
    """On stderr: a bar where that is a terminal, else a line now and then."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("stage"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("stage", said="", total=None)
        self._lines = not console.is_terminal
        self._next_line = time.monotonic() + LINE_S

    def __enter__(self) -> _Progress:
        if not self._lines:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._lines:
            self._bar.stop()

    def planning(self, said: str) -> None:
        self._say(said, "")

    def copying(self, figures: Figures) -> None:
        self._bar.update(
            self._task,
            total=figures.copied_bytes + figures.missing_bytes or None,
            completed=figures.copied_bytes,
        )
        self._say(
            f"{decimal(round(figures.bytes_per_s))}/s, {figures.missing_shards:,} shards to go"
            + (f", {figures.stalls:,} storage stalls" if figures.stalls else ""),
            f"copied {decimal(figures.copied_bytes)}, {decimal(figures.missing_bytes)} to go, ",
        )

    def _say(self, said: str, instead_of_bar: str) -> None:
        self._bar.update(self._task, said=said)
        now = time.monotonic()
        if self._lines and now >= self._next_line:
            self._next_line = now + LINE_S
            typer.echo(f"stage: {instead_of_bar}{said}", err=True)


def staged_text(staged: Staged, staging: StagingSettings) -> str:
    figures = staged.figures
    first, stop = staged.steps
    rate = round(figures.copied_bytes / max(staged.seconds, 1e-9))
    lines = [
        f"steps {first} to {stop - 1} read {staged.needed_shards:,} shards of "
        f"{decimal(staged.needed_bytes)} here; {staged.staged_shards:,} of them are in "
        f"{staging.cache_dir} now",
        f"copied {figures.copied_shards:,} shards, {decimal(figures.copied_bytes)} in "
        f"{staged.seconds:.1f} s ({decimal(rate)}/s); {figures.evictions:,} others dropped",
    ]
    if figures.read_through_shards:
        lines.append(
            f"no room for {figures.read_through_shards:,} shards of "
            f"{decimal(figures.read_through_bytes)} (staging.budget_bytes "
            f"{decimal(staging.budget_bytes)}): they will be read from their origins"
        )
    if staged.failed_shards:
        lines.append(
            f"{staged.failed_shards:,} shards could not be copied, the last because: "
            f"{figures.last_error}"
        )
    return "\n".join(lines)


def staged_object(staged: Staged) -> dict[str, Any]:
    return {
        "steps": list(staged.steps),
        "needed_shards": staged.needed_shards,
        "needed_bytes": staged.needed_bytes,
        "staged_shards": staged.staged_shards,
        "failed_shards": staged.failed_shards,
        "seconds": round(staged.seconds, 3),
        **dataclasses.asdict(staged.figures),
    }
