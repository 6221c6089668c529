"""Commands that plan and start nothing: `plan`, `simulate`, and `fit-cost` for their cost model.

Invariants: as in app.
"""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from dataservice.cli.arguments import AsJson, ConfigPath, PacksPerCell, Steps
from dataservice.cli.consoles import wide_console


def plan(
    config: ConfigPath,
    steps: Steps,
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    micro_steps: Annotated[int, typer.Option(min=1, help="Micro-steps of a step.")],
    packs_per_cell: PacksPerCell = 1,
    as_json: AsJson = False,
) -> None:
    """Print what every rank would get in the given steps; starts nothing.

    With --json one object a line, one line a step.
    """
    from dataservice.cli.index_view import open_index
    from dataservice.cli.plan_view import PlanView, parse_steps, step_table
    from dataservice.config import load_config
    from dataservice.core.settings import Grid

    settings = load_config(config)
    grid = Grid(dp_size=dp_size, micro_steps=micro_steps, packs_per_cell=packs_per_cell)
    first, stop = parse_steps(steps)
    view = PlanView(settings, open_index(settings))
    for warning in view.plan.warnings:
        typer.echo(f"warning: {warning}", err=True)
    console = wide_console()
    num_steps = 0
    for step in view.steps(grid, first, stop):
        num_steps += 1
        if as_json:
            typer.echo(orjson.dumps(step))
        else:
            console.print(step_table(step))
    if num_steps < stop - first:
        typer.echo(f"the plan ends after step {first + num_steps - 1}", err=True)
        if view.left_over:
            left = ", ".join(f"{count:,} of {name}" for name, count in view.left_over.items())
            typer.echo(f"samples too few for another step (remainder: drop): {left}", err=True)


def simulate(
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    micro_steps: Annotated[int, typer.Option(min=1, help="Micro-steps of a step.")],
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="The YAML file of a run; its index.")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="MIX", help="In its place: text80, mostlyvl or gravity.")
    ] = None,
    packs_per_cell: PacksPerCell = 1,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to look at.")] = 1,
    llm_ms: Annotated[
        float | None,
        typer.Option(min=0, help="LLM time of a pack. Default: the mean pack's vision time."),
    ] = None,
    vit_ms_per_token: Annotated[
        float | None,
        typer.Option(min=0, help="Vision encoder's time of an image token, on average."),
    ] = None,
    cost_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Of `dataservice fit-cost`, in place of both times."),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: the config's, or 8.")
    ] = None,
    node_gbits: Annotated[
        float | None,
        typer.Option(min=0.001, help="Network of a node each way, Gbit/s. Default: 100."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B",
            help="Also for these values, of dp_size, pack_length, max_pixels, max_tiles or "
            "open_bins; several: all combinations.",
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The report. Default: simulation.html; --json: none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare packers and placements before a GPU hour is spent: waiting, fill, tokens a second.

    Reads an index or makes up samples; decodes nothing. Prints a table and writes a report.
    """
    from dataservice.cli.progress import progress
    from dataservice.cli.simulate_report import page
    from dataservice.cli.simulate_run import (
        DEFAULT_NODE_GBITS,
        Options,
        parse_sweep,
        run,
        workload_of,
    )
    from dataservice.cli.simulate_view import as_json as simulation_object
    from dataservice.cli.simulate_view import print_report, write_page
    from dataservice.config.cost_file import load_cost_file
    from dataservice.core.settings import Grid

    options = Options(
        grid=Grid(dp_size=dp_size, micro_steps=micro_steps, packs_per_cell=packs_per_cell),
        steps=steps,
        llm_ms=llm_ms,
        vit_ms_per_token=vit_ms_per_token,
        fitted=None if cost_file is None else load_cost_file(cost_file),
        ranks_per_node=ranks_per_node,
        node_gbits=DEFAULT_NODE_GBITS if node_gbits is None else node_gbits,
        sweep=parse_sweep(sweep or ()),
    )
    workload = workload_of(config, synthetic, options)
    with progress("simulate", "packings") as show:
        report = run(workload, options, show)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    path = write_page(html, page(report)) if html or not as_json else None
    if as_json:
        typer.echo(orjson.dumps(simulation_object(report, path)))
    else:
        print_report(report, wide_console())
        typer.echo(f"report: {path}")


def fit_cost(
    timings: Annotated[
        list[str],
        typer.Argument(
            metavar="TIMINGS...",
            help="JSONL or CSV files, a row per timed micro-batch: patches, patches_squared, "
            "length_squared, ms or seconds, and vision_ms where it was timed by itself.",
        ),
    ],
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write the model here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model to measured compute times, for `cost: fitted` in the config."""
    from dataservice.cli.fit_view import fit_object, fit_text
    from dataservice.cli.timings import read_timings
    from dataservice.config.cost_file import write_cost_file
    from dataservice.core.fit import fit

    rows = read_timings(timings)
    patches, patches_squared, length_squared = rows.terms
    found = fit(patches, patches_squared, length_squared, rows.seconds, rows.vision_seconds)
    cost = found.to_cost()
    if out is not None:
        write_cost_file(out, cost)
    if as_json:
        typer.echo(orjson.dumps(fit_object(found, cost, out)))
    else:
        typer.echo(fit_text(found, cost, out))
