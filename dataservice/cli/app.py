"""The `dataservice` command: its commands, its own options, and what a failed command says.

Invariants: results go to stdout, everything else to stderr; an error is one paragraph, with
`--debug` also its traceback; the exit code says whose it is, as `--help` has it; only `serve`, and
`index` with an address, import ray. A command imports what it needs when it runs: `lint` promises
to look at a small file in less memory than all of it takes.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from dataservice import __version__
from dataservice.cli import (
    data_commands,
    look_commands,
    operator_commands,
    plan_commands,
    replay_command,
    service_commands,
)
from dataservice.cli.typing_in import App
from dataservice.errors import DataServiceError
from dataservice.masking import mask_urls

FOUND, USER_ERROR, OWN_ERROR, INTERRUPTED = 1, 2, 70, 130
"""Exit codes; 70 is EX_SOFTWARE of sysexits.h, 130 what shells have for SIGINT."""
_EXIT_CODES = (
    f"Exit codes: 0 all is well. {FOUND}: it ran, and what it looked at is not well; its own help "
    f"says when. {USER_ERROR}: a command line, a setting, a file or a service is not as it should "
    f"be; the error says what to do. {OWN_ERROR}: an error of dataservice itself. {INTERRUPTED}: "
    "interrupted."
)

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A data service for multimodal pretraining: plan on metadata, materialise late.",
    epilog=_EXIT_CODES,
)
# In the order of `--help`.
app.command()(data_commands.index)
app.command()(data_commands.lint)
app.command()(look_commands.inspect)
app.command()(look_commands.preview)
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
app.command()(look_commands.state)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits, with a code that `--help` explains."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        # --debug may stand behind the command, too.
        app([*["--debug"] * debug, *(word for word in given if word != "--debug")])
    except BrokenPipeError:
        # The reader of our output went away; nothing may be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FOUND)
    except (DataServiceError, OSError) as error:
        _give_up(str(error), USER_ERROR, debug=debug)
    except KeyboardInterrupt:
        _give_up("interrupted", INTERRUPTED, debug=debug)
    except Exception as error:
        _give_up(_unexpected(error), OWN_ERROR, debug=debug)


def _give_up(words: str, code: int, *, debug: bool) -> NoReturn:
    """Ends the command from within an `except`."""
    if debug:
        traceback.print_exc()
    typer.echo(f"error: {words}", err=True)
    sys.exit(code)


def _unexpected(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    what = " ".join(mask_urls(str(error)).split())
    return (
        f"dataservice itself failed: {type(error).__name__}{': ' if what else ''}{what}{where}; "
        "this is not a mistake of yours; run the command again with --debug and report what it "
        "prints"
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataservice {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log more; errors with their traceback.")
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
