"""What `dataservice plan` prints: the steps of a plan, cell by cell.

Invariants: nothing is started and nothing read but the index; a step is the same wherever the
range begins; --json and the table show the same values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from dataservice.config import Config
from dataservice.core.plan import Plan
from dataservice.core.plan.check import no_step
from dataservice.core.plan.run_plan import RunPlan
from dataservice.core.settings import Grid, PlanSettings
from dataservice.core.tables import StepPlan
from dataservice.errors import ConfigError
from dataservice.storage.index import Index

_WORDS = {
    "split": "split into pieces",
    "shrunk": "with images shrunk",
    "truncated": "truncated",
    "images_cut": "truncated before an image",
    "over_cap": "above a cap, alone in a pack",
    "dropped_long": "left out as too long",
    "rejected": "records that cannot be used",
    "cut": "given up with a phase",
}
_COLUMNS = ("micro", "rank", "pack", "number", "tokens", "images", "image\ntokens", "cost", "lane")


def parse_steps(text: str) -> tuple[int, int]:
    """Reads "A:B" as (A, B); A may be left out."""
    match = re.fullmatch(r"(\d*):(\d+)", text)
    if match is None or int(match[1] or 0) >= int(match[2]):
        raise ConfigError(f"--steps {text}: should be A:B with A below B, such as 0:10")
    return int(match[1] or 0), int(match[2])


def grid_or_reference(
    plan: PlanSettings, dp_size: int | None, micro_steps: int | None, packs_per_cell: int
) -> Grid:
    """What is not given is that of the grid that the plan's packs are made for."""
    return Grid(
        dp_size=dp_size or plan.reference_ranks,
        micro_steps=micro_steps or plan.reference_micro_steps,
        packs_per_cell=packs_per_cell,
    )


def ends_before(first: int, stop: int, settings: PlanSettings, grid: Grid) -> ConfigError:
    """What is said where the plan ends before the first step asked for."""
    if first == 0:
        return no_step(settings, grid)
    return ConfigError(f"--steps {first}:{stop}: the plan ends before step {first}")


class PlanView:
    """Steps of one plan as plain objects."""

    def __init__(self, config: Config, index: Index) -> None:
        self.settings, self.exclude = config.plan, config.exclude
        self.index = index
        self.plan = Plan(config.plan, index)
        self.left_over: dict[str, int] = {}
        """Source -> samples that no step takes; known once the plan has ended."""

    def steps(self, grid: Grid, first: int, stop: int) -> Iterator[dict[str, Any]]:
        """One object a step; fewer when the plan ends before `stop`, ConfigError when it ends
        before `first`.
        """
        run = RunPlan(plan=self.plan, grid=grid, exclude=self.exclude)
        cursor = run.skip(self.plan.start(), first)
        for step in range(first, stop):
            planned = run.step(cursor)
            if planned is None:
                if step == first:
                    raise ends_before(first, stop, self.settings, grid)
                self.left_over = self.plan.left_over(cursor)
                return
            yield self._describe(planned)
            cursor = planned.next_cursor

    def _describe(self, planned: StepPlan) -> dict[str, Any]:
        grid = planned.grid
        cells: dict[tuple[int, int], list[dict[str, Any]]] = {
            (micro_step, dp_rank): []
            for micro_step in range(grid.micro_steps)
            for dp_rank in range(grid.dp_size)
        }
        for i in range(planned.num_packs):
            place = (int(planned.micro_step[i]), int(planned.dp_rank[i]))
            cells[place].append(self._describe_pack(planned, i))
        images = {place: sum(p["num_images"] for p in packs) for place, packs in cells.items()}
        return {
            "step": planned.step,
            "phase": planned.phase,
            "pack_length": planned.pack_length,
            "plan_digest": self.plan.digest,
            "loss_tokens": planned.total_loss_tokens,
            "lockstep_cost": planned.lockstep_cost,
            "lockstep_bound": planned.lockstep_bound,
            "lockstep_arrival": planned.lockstep_arrival,
            "sync_cost": planned.sync_cost,
            "sync_bound": planned.sync_bound,
            "end_cost": planned.end_cost,
            "end_bound": planned.end_bound,
            "moved": planned.moved,
            "moved_bound": planned.moved_bound,
            "moved_bytes": planned.moved_bytes,
            "moved_bytes_bound": planned.moved_bytes_bound,
            "ranks_without_images": [
                sum(images[micro_step, rank] == 0 for rank in range(grid.dp_size))
                for micro_step in range(grid.micro_steps)
            ],
            "counts": self.plan.counts_in(planned),
            "cells": [
                {
                    "micro_step": micro_step,
                    "dp_rank": dp_rank,
                    "num_images": images[micro_step, dp_rank],
                    "packs": packs,
                }
                for (micro_step, dp_rank), packs in cells.items()
            ],
        }

    def _describe_pack(self, planned: StepPlan, i: int) -> dict[str, Any]:
        padding = planned.lane[i] < 0
        return {
            "pack_id": planned.pack_id(i),
            "number": int(planned.pack_number[i]),
            "cost": int(planned.cost[i]),
            "tokens": int(planned.tokens[i]),
            "image_tokens": int(planned.image_tokens[i]),
            "num_images": int(planned.num_images[i]),
            "loss_tokens": int(planned.loss_tokens[i]),
            "lane": int(planned.lane[i]),
            "sample_keys": [] if padding else self._sample_keys(planned, i),
        }

    def _sample_keys(self, planned: StepPlan, i: int) -> list[str]:
        window = self.plan.window(int(planned.lane[i]), int(planned.window[i]))
        spec = self.index.pack_spec(window, int(planned.number[i]), rules=self.settings.vision)
        return [item.piece_key for item in spec.items]


def counts_text(counts: dict[str, dict[str, int]]) -> str:
    """Samples by source and reason, in words; "" for none."""
    return "; ".join(
        f"{source}: " + ", ".join(f"{count:,} {_WORDS[reason]}" for reason, count in found.items())
        for source, found in counts.items()
    )


def step_table(step: dict[str, Any]) -> Table:
    """One row a pack."""
    cells, pack_length = step["cells"], step["pack_length"]
    counted = counts_text(step["counts"])
    num_packs = sum(len(cell["packs"]) for cell in cells)
    tokens = sum(pack["tokens"] for cell in cells for pack in cell["packs"])
    table = Table(
        title=f"step {step['step']}: {num_packs} packs, {tokens / (num_packs * pack_length):.1%} "
        f"full, {step['loss_tokens']:,} loss tokens",
        caption=f"cost of the slowest ranks: {step['lockstep_cost']:,} as placed, "
        f"{step['lockstep_arrival']:,} in arrival order, {step['lockstep_bound']:,} at least; "
        f"largest total of a rank {step['end_cost']:,}, {step['end_bound']:,} at least; "
        f"plan {step['plan_digest'][:12]}"
        + (f"\nsamples of windows that begin here: {counted}" if counted else ""),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("samples", no_wrap=True, ratio=1)
    for cell in cells:
        for pack in cell["packs"]:
            keys = pack["sample_keys"]
            values = [cell["micro_step"], cell["dp_rank"], pack["pack_id"], pack["number"]]
            sizes = ("tokens", "num_images", "image_tokens", "cost")
            table.add_row(
                *map(str, values),
                *(f"{pack[name]:,}" for name in sizes),
                str(pack["lane"]),
                f"{len(keys)}: {', '.join(keys)}",
            )
    return table
