"""Commands for who operates a service: `top`, `drain`, `doctor` and `bench`.

Invariants: as in app.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import orjson
import typer

from dataservice.cli.arguments import AsJson, ConfigPath
from dataservice.cli.security_options import speaks_to_service
from dataservice.cli.service_commands import Endpoint
from dataservice.errors import ConfigError
from dataservice.rpc.security import ClientSecurity


@speaks_to_service
def top(
    endpoint: Endpoint,
    every_s: Annotated[float, typer.Option(min=0.2, help="Between two looks.")] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="So many looks. Default: until q, but one where no terminal is."),
    ] = None,
    as_json: AsJson = False,
    *,
    security: ClientSecurity,
) -> None:
    """Watch a service live: who waits for whom, workers, staging, events. Ends with q or Ctrl-C.

    A service that is away is waited for. With --json one object a look.
    """
    from dataservice.cli.top_run import print_looks, watch

    if as_json or count is not None:
        print_looks(endpoint, security, every_s=every_s, count=count, as_json=as_json)
    else:
        watch(endpoint, security, every_s=every_s)


@speaks_to_service
def drain(
    endpoint: Endpoint,
    worker: Annotated[
        str | None,
        typer.Option(metavar="ID", help="One worker; another takes its place, unless scaled down."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NODE", help="A data node: its host, or its id in Ray, or how that begins."
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="What is built and not fetched is built anew elsewhere."),
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take a drained node back.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing is left.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.0, help="Longest that --wait waits.")] = 300.0,
    as_json: AsJson = False,
    *,
    security: ClientSecurity,
) -> None:
    """Take a worker, a node or the whole service out of service; nothing is lost.

    A worker hands over what it has not begun, and leaves once the rest is fetched.

    A node's lanes move at once, its workers leave, and nothing starts there until --undo, or until
    it joins Ray anew.

    The service hands out no more steps; stopped then and served again, it goes on from there.

    Exits with 1 when --wait ended before it was done.
    """
    from dataservice.cli.drain_run import drain as drained
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.draining import Drain

    if worker is not None and node is not None:
        raise ConfigError("--worker and --node: name one of them")
    if undo and node is None:
        raise ConfigError("--undo: takes a node back; name it with --node")
    if "" in (worker, node):
        raise ConfigError("--worker or --node is empty: name one, or give neither for the service")
    request = Drain(worker=worker or "", node=node or "", now=now, undo=undo)
    with CoordinatorClient(endpoint, security) as client:
        told = drained(
            client,
            request,
            timeout_s=timeout_s if wait else None,
            say=lambda words: typer.echo(words, err=True),
        )
    if as_json:
        typer.echo(orjson.dumps(dataclasses.asdict(told)))
    else:
        typer.echo(told.words)
    raise typer.Exit(1 if wait and not told.done else 0)


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A run's YAML file, to check what it names, too."),
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option(help="In place of staging.cache_dir, to measure its disk.")
    ] = None,
    state_dir: Annotated[
        str | None, typer.Option(help="In place of state_dir, to measure its disk.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, what is installed and what a config names, and say what to do.

    Takes some ten seconds, and writes at most 256 MiB, which it removes. Run it on every node.
    Exits with 1 when there is a problem; warnings cost speed or safety, not the run.
    """
    from dataservice.cli.doctor_run import findings_of, show

    findings = findings_of(config, cache_dir=cache_dir, state_dir=state_dir)
    raise typer.Exit(0 if show(findings, as_json=as_json) else 1)


def bench(
    config: ConfigPath,
    pack_s: Annotated[
        float | None,
        typer.Option(min=1e-4, help="Seconds that a GPU takes for a pack, forward and backward."),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, help="Data-parallel ranks, for the number of workers in all.")
    ] = 1,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="That it takes, about.")
    ] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine builds packs of a config's own data: workers per GPU.

    Builds the first packs of the run as a worker does, and reads as a stager does; writes nothing
    but a file beside the cache that it removes. Run it on a machine that will run workers.
    """
    from rich.console import Console

    from dataservice.cli.bench_run import measure, needs_table, notes, table_of, told
    from dataservice.cli.index_view import open_index
    from dataservice.config import load_config

    settings = load_config(config)
    open_index(settings)
    measured = measure(
        settings, seconds=seconds, say=lambda words: typer.echo(f"{words} ...", err=True)
    )
    found = told(measured, pack_s=pack_s, gpus=gpus)
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    console = Console()
    console.print(table_of(found), highlight=False)
    console.print(needs_table(found))
    for note in notes(found):
        console.print(note, highlight=False)
