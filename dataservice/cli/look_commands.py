"""Commands that look closely: `preview` at packs, `inspect` at a sample, `state` at saved states.

Invariants: as in app.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import orjson
import typer

from dataservice.cli.arguments import AsJson, ConfigPath, DpSize, MicroSteps, PacksPerCell, Steps


def preview(
    config: ConfigPath,
    steps: Steps = "0:1",
    dp_size: DpSize = None,
    micro_steps: MicroSteps = None,
    packs_per_cell: PacksPerCell = 1,
    rank: Annotated[int | None, typer.Option(min=0, help="Default: all.")] = None,
    packs: Annotated[int, typer.Option(min=1, help="How many to show at most.")] = 16,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Write the pages here; open its index.html.")
    ] = "preview",
    as_json: AsJson = False,
) -> None:
    """Show packs as the model will get them: text by tokens, labels, pictures, holes; as HTML.

    Needs no service: the packs are built here. With --json one object a line, one line a pack.
    """
    from dataservice.cli.index_view import open_index
    from dataservice.cli.pack_rows import show_packs
    from dataservice.cli.plan_view import grid_or_reference, parse_steps
    from dataservice.cli.preview_run import previewed
    from dataservice.cli.progress import Show
    from dataservice.config import load_config

    settings, wanted = load_config(config), parse_steps(steps)
    open_index(settings)
    grid = grid_or_reference(settings.plan, dp_size, micro_steps, packs_per_cell)

    def build(show: Show) -> Iterator[dict[str, Any]]:
        say = partial(typer.echo, err=True)
        return previewed(
            settings, steps=wanted, grid=grid, rank=rank, most=packs, out=out, say=say, show=show
        )

    show_packs("preview", build, of=f"steps {steps}", how="built here", as_json=as_json)


def inspect(
    config: ConfigPath,
    what: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLE|FILE:LINE|FILE",
            help="A sample as `plan` and holes name it, a record as `lint` does, or a whole "
            "record file or archive.",
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Also find the sample's packs in steps A to B - 1."),
    ] = None,
    dp_size: DpSize = None,
    micro_steps: MicroSteps = None,
    packs_per_cell: PacksPerCell = 1,
    as_json: AsJson = False,
) -> None:
    """Show one sample from end to end: record, turns, images, tokens, cost; what is wrong with it.

    Of a file, what its records or members are. Exits with 1 when the sample, or a part of the file,
    cannot be used.
    """
    from dataservice.cli.inspect_run import inspected
    from dataservice.cli.inspect_view import archive_text, file_text, record_text
    from dataservice.cli.plan_view import grid_or_reference, parse_steps
    from dataservice.config import load_config

    settings = load_config(config)
    grid = grid_or_reference(settings.plan, dp_size, micro_steps, packs_per_cell)
    told = inspected(settings, what, None if steps is None else parse_steps(steps), grid)
    if as_json:
        typer.echo(orjson.dumps(told))
    elif told["kind"] == "record":
        typer.echo("\n".join(record_text(told, settings.plan.oversize)))
    else:
        text = file_text if told["kind"] == "file" else archive_text
        typer.echo("\n".join(text(told)))
    raise typer.Exit(0 if told["outcome"] == "ok" else 1)


def state(
    state: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON of what a rank's stream.state_dict() gave; of a checkpoint of torch: "
            "`python -m trainer_client.saved_state CHECKPOINT`.",
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Another, to compare it with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a saved state, or what lies between two of them, in words; needs nothing but them.

    Exits with 1 when no service would go on with one of them, whatever it serves.
    """
    from dataservice.cli.replay_run import read_state
    from dataservice.cli.state_view import changes, changes_text, state_object, state_text

    files = [state] if other is None else [state, other]
    told = [state_object(read_state(file, "")) for file in files]
    between = list(changes_text(*told)) if len(told) == 2 else []
    if as_json and between:
        both = {"states": told, "changes": changes(*told), "words": between}
        typer.echo(orjson.dumps(both))
    elif as_json:
        typer.echo(orjson.dumps(told[0]))
    else:
        for file, of in zip(files, told, strict=True):
            typer.echo("\n".join(state_text(file, of)))
        for words in between:
            typer.echo(words)
    raise typer.Exit(0 if all(of["outcome"] == "ok" for of in told) else 1)
