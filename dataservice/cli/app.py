"""The `dataservice` command: its commands, its own options, and what a failed command says.

Invariants: results go to stdout, everything else to stderr; a user's error is one paragraph and
exit code 2, with `--debug` also its traceback; only `serve`, and `index` with an address, import
ray. A command imports what it needs when it runs: `lint` promises to look at a small file in less
memory than all of it takes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dataservice import __version__
from dataservice.cli import (
    data_commands,
    operator_commands,
    plan_commands,
    replay_command,
    service_commands,
)
from dataservice.errors import DataServiceError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A data service for multimodal pretraining: plan on metadata, materialise late.",
)
# In the order of `--help`.
app.command()(data_commands.index)
app.command()(data_commands.lint)
app.command()(plan_commands.plan)
app.command()(data_commands.stage)
app.command("fit-cost")(plan_commands.fit_cost)
app.command()(plan_commands.simulate)
app.command()(service_commands.serve)
app.command()(service_commands.status)
app.command()(operator_commands.top)
app.command()(service_commands.scale)
app.command()(operator_commands.drain)
app.command()(operator_commands.doctor)
app.command()(operator_commands.bench)
app.command()(replay_command.replay)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, 1 if `lint` rejects, `stage` fails to copy something, `doctor`
    finds a problem or `drain --wait` is not done in time, 2 for a user's error."""
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataservice {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log more; errors with traceback.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print it and stop."
        ),
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
