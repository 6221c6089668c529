"""The command that builds a past step again: `replay`.

Invariants: as in app.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import orjson
import typer
from rich.console import Console

from dataservice.cli.arguments import AsJson, ConfigPath
from dataservice.cli.plan_commands import WIDEST_TABLE


def replay(
    config: ConfigPath,
    state: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON of what any rank's stream.state_dict() gave in the run; of a checkpoint of "
            "torch: `python -m trainer_client.saved_state CHECKPOINT`.",
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="Which, as batch.step counted.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Default: all.")] = None,
    holes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A service's coordinator.journal or quarantine.jsonl. Default: state_dir's.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write the packs here: arrays (.npz) and pages (.html)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the packs of a past step again, byte for byte; the service need not run.

    With --json one object a line, one line a pack.
    """
    from dataservice.cli.progress import progress
    from dataservice.cli.replay_run import packs_table, replayed
    from dataservice.config import load_config

    rows = []
    with progress("replay", "packs") as show:
        for row in replayed(
            load_config(config),
            state=state,
            step=step,
            rank=rank,
            holes=holes,
            out=out,
            say=partial(typer.echo, err=True),
            show=show,
        ):
            if as_json:
                typer.echo(orjson.dumps(row))
            else:
                rows.append(row)
    if not as_json:
        console = Console(width=None if sys.stdout.isatty() else WIDEST_TABLE)
        console.print(packs_table(f"step {step}: {len(rows)} packs, built again", rows))
