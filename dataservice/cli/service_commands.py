"""Commands about a service: `serve` runs one, `status` and `scale` speak to it.

Invariants: as in app.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console

from dataservice.cli.arguments import AsJson, ConfigPath
from dataservice.cli.security_options import speaks_to_service
from dataservice.errors import ConfigError
from dataservice.rpc.security import ClientSecurity

if TYPE_CHECKING:
    from dataservice.config import Config

CALL_TIMEOUT_S = 10.0
Endpoint = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="host:port, as `dataservice serve` prints it.")
]


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
        typer.Option(
            "--insecure",
            help="Allow a host that other machines reach, without TLS or without a token.",
        ),
    ] = False,
) -> None:
    """Run the service in the foreground until SIGINT or SIGTERM."""
    from dataservice.cli.index_view import open_index
    from dataservice.config import load_config
    from dataservice.config.folders import check_service_folders

    settings = _overridden(
        load_config(config), port=port, workers=workers, host=host, insecure=insecure
    )
    # Here, too: what follows may index for hours.
    check_service_folders(settings, is_data_node=address is None)
    open_index(settings)
    from dataservice.actors.launch import serve_foreground

    serve_foreground(settings, address=address)
    typer.echo("stopped; served again with the same state_dir, it goes on from here")


@speaks_to_service
def status(endpoint: Endpoint, as_json: AsJson = False, *, security: ClientSecurity) -> None:
    """Show what a running service does."""
    from dataservice.cli.status_view import print_status
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.messages import GetStatus, StatusReport

    with CoordinatorClient(endpoint, security) as client:
        report: StatusReport = client.call(GetStatus(), CALL_TIMEOUT_S)
    if as_json:
        typer.echo(report.status)
    else:
        print_status(orjson.loads(report.status), Console())


@speaks_to_service
def scale(
    endpoint: Endpoint,
    workers: Annotated[
        str, typer.Argument(metavar="N|auto", help="Workers to have; auto: as trainers need.")
    ],
    as_json: AsJson = False,
    *,
    security: ClientSecurity,
) -> None:
    """Set the number of workers by hand, or no longer; trainers notice nothing but the speed."""
    from dataservice.rpc.client import CoordinatorClient
    from dataservice.wire.messages import Scaled, ScaleWorkers

    if workers != "auto" and not (workers.isascii() and workers.isdigit() and int(workers)):
        raise ConfigError(f'workers is "{workers}": give a number of at least 1, or auto')
    number = 0 if workers == "auto" else int(workers)
    with CoordinatorClient(endpoint, security) as client:
        scaled: Scaled = client.call(ScaleWorkers(workers=number), CALL_TIMEOUT_S)
    if as_json:
        typer.echo(orjson.dumps(dataclasses.asdict(scaled)))
        return
    reason = f" ({scaled.reason})" if scaled.reason else ""
    typer.echo(f"workers: {scaled.before}, now going to {scaled.target}{reason}")


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
