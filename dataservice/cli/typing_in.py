"""What the command line does with what was typed: all that is missing is named at once.

Invariants: nothing is said where `--help`, or another option that ends the command, was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from dataservice.errors import ConfigError


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """ConfigError where two or more arguments and options are missing."""
        if args or not self.no_args_is_help:
            self._check_missing(ctx, list(args))
        return super().parse_args(ctx, args)

    def _check_missing(self, ctx: Any, args: list[str]) -> None:
        if ctx.resilient_parsing:  # for completion, in the middle of a line
            return
        given, _, _ = self.make_parser(ctx).parse_args(args=args)
        parameters = self.get_params(ctx)
        if any(of.is_eager and given.get(of.name or "") for of in parameters):
            return
        missing = [
            of.opts[0] if of.param_type_name == "option" else of.metavar or str(of.name).upper()
            for of in parameters
            if of.required and of.value_from_envvar(ctx) is None and not given.get(of.name or "")
        ]
        if len(missing) > 1:
            named = f"{', '.join(missing[:-1])} and {missing[-1]}"
            raise ConfigError(
                f"{self.name} needs {named}, too; `dataservice {self.name} --help` says what they "
                "are"
            )


class App(typer.Typer):
    """Whose commands are all of the kind above."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=Command, **given)
