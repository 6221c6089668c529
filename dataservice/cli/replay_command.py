"""The command that builds a past step again: `replay`.

Invariants: as in app.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer

from dataservice.cli.arguments import AsJson, ConfigPath


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
    from dataservice.cli.pack_rows import show_packs
    from dataservice.cli.progress import Show
    from dataservice.cli.replay_run import replayed
    from dataservice.config import load_config

    settings = load_config(config)

    def build(show: Show) -> Iterator[dict[str, Any]]:
        say = partial(typer.echo, err=True)
        return replayed(
            settings, state=state, step=step, rank=rank, holes=holes, out=out, say=say, show=show
        )

    show_packs("replay", build, of=f"step {step}", how="built again", as_json=as_json)
