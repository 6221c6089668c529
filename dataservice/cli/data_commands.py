"""Commands that read data: `index`, `lint` and `stage`.

Invariants: as in app.
"""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from dataservice.cli.arguments import AsJson, ConfigPath, DpSize, MicroSteps, PacksPerCell, Steps


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
    as_json: AsJson = False,
) -> None:
    """Index what is new or changed: offsets, token counts, picture sizes. Decodes nothing.

    Stopped at any moment, it goes on from there when it is run again.
    """
    from dataservice.cli.index_view import index_with_progress
    from dataservice.config import load_config

    index_with_progress(load_config(config), processes=processes, address=address, as_json=as_json)


def lint(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|MIXTURE|FILE...",
            help="The YAML file of a run, a mixture file of another trainer, or pictures, zips, "
            "tars, record files and folders of them.",
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


def stage(
    config: ConfigPath,
    steps: Steps,
    dp_size: DpSize = None,
    micro_steps: MicroSteps = None,
    packs_per_cell: PacksPerCell = 1,
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
    from dataservice.cli.plan_view import grid_or_reference, parse_steps
    from dataservice.cli.stage_view import stage, staged_object, staged_text
    from dataservice.config import load_config

    settings = load_config(config)
    staged = stage(
        settings,
        open_index(settings),
        steps=parse_steps(steps),
        grid=grid_or_reference(settings.plan, dp_size, micro_steps, packs_per_cell),
        nodes=[] if nodes is None else [name.strip() for name in nodes.split(",")],
        node=node,
    )
    if as_json:
        typer.echo(orjson.dumps(staged_object(staged)))
    else:
        typer.echo(staged_text(staged, settings.staging))
    raise typer.Exit(1 if staged.failed_shards else 0)
