"""Options of the commands that speak to a running service: what they show to it.

Invariants: an option goes before its variable of the environment; the environment before nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from dataservice.errors import ServiceUnavailable
from dataservice.rpc.security import ClientSecurity

__all__ = ["speaks_to_service"]

PANEL = "Certificates and token"


def _option(metavar: str, help_text: str) -> Any:
    option = typer.Option(metavar=metavar, rich_help_panel=PANEL, help=help_text)
    return Annotated[str | None, option]


_OPTIONS = {
    "ca": _option("FILE", "Who signed the service's certificate. Default: $DATASERVICE_TLS_CA."),
    "cert": _option("FILE", "Of this end. Default: $DATASERVICE_TLS_CERT."),
    "key": _option("FILE", "Its key. Default: $DATASERVICE_TLS_KEY."),
    "token_file": _option("FILE", "With the token. Default: $DATASERVICE_TOKEN_FILE."),
    "server_name": _option(
        "NAME",
        "That the service's certificate is for, where it is not the host of ENDPOINT. "
        "Default: $DATASERVICE_TLS_SERVER_NAME.",
    ),
}
_FIELDS = {"ca": "ca_file", "cert": "cert_file", "key": "key_file"}


def speaks_to_service(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command whose `security` is keyword-only those options in its place."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        shown = {name: given.pop(name) for name in _OPTIONS}
        try:
            command(**given, security=_security(shown))
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"{error}{_where_to_ask(str(error))}") from None

    signature = inspect.signature(command, eval_str=True)
    mine = [one for name, one in signature.parameters.items() if name != "security"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    parameters = [*mine, *added]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _where_to_ask(text: str) -> str:
    if "Failed parsing HTTP/2" in text:
        return "; that port speaks no gRPC, such as the status page's: take that of `serving on`"
    if "failed to connect" in text or "errors resolving" in text:
        return (
            "; is `dataservice serve` running there? Its first line, `serving on`, is the endpoint"
        )
    return ""


def _security(shown: dict[str, str | None]) -> ClientSecurity:
    given = {_FIELDS.get(name, name): value for name, value in shown.items() if value is not None}
    return replace(ClientSecurity.from_environment(), **given)  # type: ignore[arg-type]
