"""Commands, options and what a failed command says.

Invariants: results go to stdout, everything else to stderr; a user's error is one paragraph and
exit code 2, with `--debug` also its traceback; only `serve`, and `index` with an address, import
ray. A command imports what it needs when it runs: `lint` promises to look at a small file in less
memory than all of it takes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console

from dataservice.errors import ConfigError, DataServiceError

if TYPE_CHECKING:
    from dataservice.config import Config

CALL_TIMEOUT_S = 10.0
WIDEST_TABLE = 160

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A data service for multimodal pretraining: plan on metadata, materialise late.",
)
ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")]
Endpoint = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="host:port, as `dataservice serve` prints it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, 1 if `lint` rejects or `stage` fails to copy something, 2 for
    a user's error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        # --debug may stand behind the command, too.
        app([*["--debug"] * debug, *(word for word in given if word != "--debug")])
    except BrokenPipeError:
        # The reader of our output went away; nothing may be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (DataServiceError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log more; errors with traceback.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


@app.command()
def index(
    config: ConfigPath,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="That read side by side. Default: one a core, if it pays."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a running Ray cluster that reads in their place; the index folder "
            "must be shared by its nodes."
        ),
    ] = None,
) -> None:
    """Index what is new or changed: offsets, token counts, picture sizes. Decodes nothing.

    Stopped at any moment, it goes on from there when it is run again.
    """
    from dataservice.cli.index_view import index_with_progress
    from dataservice.config import load_config

    index_with_progress(load_config(config), processes=processes, address=address)


@app.command()
def lint(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|FILE...",
            help="The YAML file of a run, or pictures, zips, tars, record files and folders of "
            "them.",
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROOT",
            help="Zip, tar or folder where records find their images; may be given several times.",
        ),
    ] = None,
    digest: Annotated[
        bool, typer.Option("--digest", help="With mean colours of pictures, SHA-256 of members.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report what is wrong with data before anybody trains on it. Writes nothing.

    With --json one object a line. Exits with 1 when something is rejected.
    """
    from dataservice.cli.lint_view import findings_of, print_json, print_summary

    findings = findings_of(files, images or [], digest=digest)
    good = print_json(findings, digest=digest) if as_json else print_summary(findings)
    raise typer.Exit(0 if good else 1)


@app.command()
def plan(
    config: ConfigPath,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B - 1.")],
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    micro_steps: Annotated[int, typer.Option(min=1, help="Micro-steps of a step.")],
    packs_per_cell: Annotated[int, typer.Option(min=1, help="Packs of a micro-batch.")] = 1,
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
    console = Console(width=None if sys.stdout.isatty() else WIDEST_TABLE)
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


@app.command()
def stage(
    config: ConfigPath,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B - 1.")],
    dp_size: Annotated[
        int | None,
        typer.Option(min=1, help="Data-parallel ranks. Default: plan.reference_ranks."),
    ] = None,
    micro_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-steps of a step. Default: plan.reference_micro_steps."),
    ] = None,
    packs_per_cell: Annotated[int, typer.Option(min=1, help="Packs of a micro-batch.")] = 1,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,HOST...",
            help="All data nodes, to stage this one's share alone. Default: stage everything.",
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="HOST", help="Which of them. Default: the host's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy the shards that some steps read to this node's cache, before the GPUs arrive.

    Exits with 1 when a shard could not be copied. What is there already is not copied again.
    """
    from dataservice.cli.index_view import open_index
    from dataservice.cli.plan_view import parse_steps
    from dataservice.cli.stage_view import stage, staged_object, staged_text
    from dataservice.config import load_config
    from dataservice.core.settings import Grid

    settings = load_config(config)
    staged = stage(
        settings,
        open_index(settings),
        steps=parse_steps(steps),
        grid=Grid(
            dp_size=dp_size or settings.plan.reference_ranks,
            micro_steps=micro_steps or settings.plan.reference_micro_steps,
            packs_per_cell=packs_per_cell,
        ),
        nodes=[] if nodes is None else [name.strip() for name in nodes.split(",")],
        node=node,
    )
    if as_json:
        typer.echo(orjson.dumps(staged_object(staged)))
    else:
        typer.echo(staged_text(staged, settings.staging))
    raise typer.Exit(1 if staged.failed_shards else 0)


@app.command("fit-cost")
def fit_cost(
    timings: Annotated[
        list[str],
        typer.Argument(
            metavar="TIMINGS...",
            help="JSONL or CSV files, a row per timed micro-batch: patches, patches_squared, "
            "length_squared, and ms or seconds.",
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
    found = fit(patches, patches_squared, length_squared, rows.seconds)
    cost = found.to_cost()
    if out is not None:
        write_cost_file(out, cost)
    if as_json:
        typer.echo(orjson.dumps(fit_object(found, cost, out)))
    else:
        typer.echo(fit_text(found, cost, out))


@app.command()
def simulate(
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    micro_steps: Annotated[int, typer.Option(min=1, help="Micro-steps of a step.")],
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="The YAML file of a run; its index.")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="MIX", help="In its place: text80, mostlyvl or gravity.")
    ] = None,
    packs_per_cell: Annotated[int, typer.Option(min=1, help="Packs of a micro-batch.")] = 1,
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
            help="Also for these values, of dp_size, pack_length, max_pixels or open_bins; "
            "several: all combinations.",
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
    from dataservice.cli.simulate_report import page
    from dataservice.cli.simulate_run import (
        DEFAULT_NODE_GBITS,
        Options,
        parse_sweep,
        run,
        workload_of,
    )
    from dataservice.cli.simulate_view import as_json as simulation_object
    from dataservice.cli.simulate_view import print_report, spoken, write_page
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
    with spoken() as progress:
        report = run(workload, options, progress)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    path = write_page(html, page(report)) if html or not as_json else None
    if as_json:
        typer.echo(orjson.dumps(simulation_object(report, path)))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else WIDEST_TABLE))
        typer.echo(f"report: {path}")


@app.command()
def serve(
    config: ConfigPath,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster. Default: start a local one.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="In place of serving.port.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="In place of workers.count.")] = None,
    host: Annotated[str | None, typer.Option(help="In place of serving.host.")] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow a host that other machines reach, unencrypted."),
    ] = False,
) -> None:
    """Run the service in the foreground until SIGINT or SIGTERM."""
    from dataservice.cli.index_view import open_index
    from dataservice.config import load_config

    settings = _overridden(
        load_config(config), port=port, workers=workers, host=host, insecure=insecure
    )
    open_index(settings)
    from dataservice.actors.launch import serve_foreground

    serve_foreground(settings, address=address)
    typer.echo("stopped; served again with the same state_dir, it goes on from here")


@app.command()
def status(endpoint: Endpoint, as_json: AsJson = False) -> None:
    """Show what a running service does."""
    from dataservice.cli.status_view import print_status
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.messages import GetStatus, StatusReport

    with CoordinatorClient(endpoint) as client:
        report: StatusReport = client.call(GetStatus(), CALL_TIMEOUT_S)
    if as_json:
        typer.echo(report.status)
    else:
        print_status(orjson.loads(report.status), Console())


@app.command()
def scale(
    endpoint: Endpoint,
    workers: Annotated[int, typer.Argument(min=1, metavar="N", help="Workers to have.")],
) -> None:
    """Change the number of workers; trainers notice nothing but the speed."""
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.messages import Scaled, ScaleWorkers

    with CoordinatorClient(endpoint) as client:
        scaled: Scaled = client.call(ScaleWorkers(workers=workers), CALL_TIMEOUT_S)
    typer.echo(f"workers: {scaled.before}, now going to {scaled.target}")


def _overridden(
    config: Config, *, port: int | None, workers: int | None, host: str | None, insecure: bool
) -> Config:
    serving = config.serving
    serving = dataclasses.replace(
        serving,
        port=serving.port if port is None else port,
        host=host or serving.host,
        insecure=insecure or serving.insecure,
    )
    config = dataclasses.replace(config, serving=serving)
    if workers is not None:
        if not config.workers.min <= workers <= config.workers.max:
            raise ConfigError(
                f"--workers {workers} is not between workers.min {config.workers.min} "
                f"and workers.max {config.workers.max}"
            )
        config = dataclasses.replace(
            config, workers=dataclasses.replace(config.workers, count=workers)
        )
    return config
