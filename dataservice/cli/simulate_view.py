"""What `dataservice simulate` prints: a table of strategies, one of a sweep, or both as JSON.

Invariants: the tables and the JSON show the same values; JSON has plain numbers in the units that
its names say.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dataservice.cli import simulate_words as words
from dataservice.cli.simulate_run import Report
from dataservice.core.simulate import Outcome, Simulation

DEFAULT_PAGE = "simulation.html"


def write_page(path: str | None, text: str) -> str:
    """The absolute path it was written to."""
    written = os.path.abspath(path or DEFAULT_PAGE)
    with open(written, "w", encoding="utf-8") as file:
        file.write(text)
    return written


def print_report(report: Report, console: Console) -> None:
    console.print(_strategies(report))
    fills = (
        f"{words.PACKER[packer.packer]} {words.percent(packer.fill, 2)}"
        for packer in report.simulation.packers
    )
    console.print(f"fill: {', '.join(fills)}", highlight=False)
    if report.rows:
        console.print(_sweep(report))
    counted = words.counted(report.simulation.counts)
    if counted:
        console.print("\nsamples that were not packed as they are:")
    for reason, count, sources in counted:
        console.print(f"  {reason}: {count:,} ({sources})", highlight=False)
    console.print()
    for sentence in words.assumptions(report):
        console.print(f"- {sentence}", highlight=False)


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def _strategies(report: Report) -> Table:
    found = report.simulation
    table = _table(words.title(report))
    table.add_column("strategy", no_wrap=True)
    inner = 1 < found.scenario.sync_domain < found.scenario.dp_size
    columns = ["fill", "idle,\nlockstep", "idle, end\nof step"]
    columns += [f"idle,\n{found.scenario.sync_domain} meet"] if inner else []
    columns += ["step", "tokens\na second", "against\nthe present", "packs\nmoved", "bytes\nmoved"]
    columns += ["exposed", "with\noverlap"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for of in found.outcomes:
        idle = [of.idle_lockstep, of.idle_end, *([of.idle_sync] if inner else [])]
        table.add_row(
            words.STRATEGY[of.strategy],
            words.percent(of.fill, 2),
            *map(words.percent, idle),
            words.milliseconds(of.step_ms),
            words.tokens_per_s(of.tokens_per_s),
            "" if of.strategy == "arrival" else words.gain(of.gain),
            *(_moved(of) if of.traffic.moved_packs else ("0",)),
        )
    return table


def _moved(of: Outcome) -> tuple[str, ...]:
    return (
        words.percent(of.traffic.moved_share),
        decimal(round(of.traffic.moved_bytes)),
        words.milliseconds(of.exposed_ms),
        words.milliseconds(of.exposed_overlap_ms),
    )


def _sweep(report: Report) -> Table:
    """Idle shares at the sync domain, fill of the two packers of ours, and what is gained."""
    table = _table("\nsweep: idle share by strategy, fill by packer, tokens a second gained")
    for name in report.options.sweep:
        table.add_column(words.SETTING[name].replace(" ", "\n"), justify="right")
    for strategy in words.STRATEGY:
        table.add_column(words.STRATEGY[strategy].replace(" ", "\n", 1), justify="right")
    for column in ("lbf\nfill", "balanced\nfill", "two-pass\ngains", "balanced\ngains"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        found = row.simulation
        fill = {packer.packer: packer.fill for packer in found.packers}
        table.add_row(
            *(f"{value:,}" for value in row.values.values()),
            *(words.percent(found.outcome(strategy).idle_sync) for strategy in words.STRATEGY),
            *(words.percent(fill[packer], 2) for packer in ("lbf", "balanced")),
            *(words.gain(found.outcome(name).gain) for name in ("two_pass", "balanced")),
        )
    return table


# ---- JSON ---------------------------------------------------------------------------------------


def as_json(report: Report, html: str | None) -> dict[str, Any]:
    """`html`: where the page was written."""
    return {
        "workload": report.workload,
        **_simulation(report.simulation),
        "idle_by_ranks": {
            "ranks": list(report.simulation.ranks),
            **{name: list(idle) for name, idle in report.simulation.idle_by_ranks.items()},
        },
        "samples_changed": {name: dict(of) for name, of in report.simulation.counts.items()},
        "sweep": [dict(row.values) | _simulation(row.simulation) for row in report.rows],
        "assumptions": words.assumptions(report),
        "warnings": list(report.warnings),
        "html": html,
    }


def _simulation(found: Simulation) -> dict[str, Any]:
    scenario = found.scenario
    return {
        "dp_size": scenario.dp_size,
        "micro_steps": scenario.micro_steps,
        "packs_per_cell": [grid.packs_per_cell for grid in scenario.grids],
        "pack_length": found.pack_length,
        "num_steps": found.num_steps,
        "ranks_per_node": scenario.ranks_per_node,
        "sync_domain": scenario.sync_domain,
        "node_gbits": scenario.node_gbits,
        "llm_ms": found.time.pack_ms,
        "mean_vit_ms": found.mean_vit_ms,
        "strategies": [_outcome(of) for of in found.outcomes],
        "packers": [
            {
                name: value
                for name, value in dataclasses.asdict(packer).items()
                if name != "histogram"
            }
            for packer in found.packers
        ],
    }


def _outcome(of: Outcome) -> dict[str, Any]:
    values = dataclasses.asdict(of)
    traffic = values.pop("traffic")
    del traffic["busiest_node_bytes"]
    return values | traffic
