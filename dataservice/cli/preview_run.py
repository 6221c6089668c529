"""What `dataservice preview` does: plans steps, builds their packs here, writes pages of them.

Invariants: no service is needed and nothing is written but the pages; a picture or record that
cannot be had is the hole that a run makes of it; packs beyond the most wanted are not built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dataservice.actors.offline import OfflineSteps, PlacedPack
from dataservice.cli.pack_folder import PackFolder, described
from dataservice.cli.plan_view import ends_before
from dataservice.cli.progress import Show, no_progress
from dataservice.cli.replay_run import sizes_text
from dataservice.config import Config
from dataservice.config.folders import check_writable
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError


def previewed(
    config: Config,
    *,
    steps: tuple[int, int],
    grid: Grid,
    rank: int | None,
    most: int,
    out: str,
    say: Callable[[str], None],
    show: Show = no_progress,
) -> Iterator[dict[str, Any]]:
    """One object a pack, at most `most`, in the order of steps, micro-steps and ranks; the pages
    are there when the last one was given. ConfigError where the plan ends before the first."""
    if rank is not None and rank >= grid.dp_size:
        raise ConfigError(f"--rank {rank}: with {grid.dp_size} they are 0 to {grid.dp_size - 1}")
    check_writable("--out", out)
    first, stop = steps
    with contextlib.closing(OfflineSteps(config, grid, say=say)) as offline:
        vision = config.plan.vision
        folder = PackFolder(out, offline.renderer, vision, with_arrays=False)
        num_packs = grid.dp_size * grid.micro_steps * grid.packs_per_cell * (stop - first)
        total = min(most, num_packs if rank is None else num_packs // grid.dp_size)
        number = 0
        for step, pack in _packs(offline, steps, rank):
            if number == most:
                say(f"the first {most:,} packs; --packs shows more")
                break
            number += 1
            row = described(step, pack)
            folder.add(row, pack, name=_name(step, pack))
            show(number, total, row["pack_id"])
            yield row
        about = {
            "steps": list(steps),
            "plan_digest": offline.plan_digest,
            "sizes": [grid.dp_size, grid.micro_steps, grid.packs_per_cell],
        }
        facts = {
            "job": config.job,
            "plan": offline.plan_digest,
            "sizes": sizes_text(grid.dp_size, grid.micro_steps, grid.packs_per_cell),
            "shown": f"{number:,} packs",
        }
        name = f"Step {first}" if stop == first + 1 else f"Steps {first} to {stop - 1}"
        page = folder.finish("preview.json", about, title=f"{name}, a preview", facts=facts)
        say(f"written: {page}")


def _packs(
    offline: OfflineSteps, steps: tuple[int, int], rank: int | None
) -> Iterator[tuple[int, PlacedPack]]:
    first, stop = steps
    settings, grid = offline.config.plan, offline.grid
    ranks = range(grid.dp_size) if rank is None else (rank,)
    cursor = offline.planner.plan.start()
    for step in range(first, stop):
        cursor = offline.skipped_to(cursor, step)
        active = offline.step(cursor) if cursor.step == step else None
        if active is None:
            if step == first:
                raise ends_before(first, stop, settings, grid)
            return
        for pack in offline.packs(active, ranks):
            yield step, pack


def _name(step: int, pack: PlacedPack) -> str:
    return f"step{step:06}-micro{pack.micro_step:03}-rank{pack.dp_rank:04}-{pack.place}"
