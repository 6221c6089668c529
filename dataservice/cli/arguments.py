"""Arguments and options that several commands have.

Invariants: none of them has a default; each command says its own.
"""

from __future__ import annotations

from typing import Annotated

import typer

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")]
Steps = Annotated[str, typer.Option(metavar="A:B", help="Steps A to B - 1.")]
PacksPerCell = Annotated[int, typer.Option(min=1, help="Packs of a micro-batch.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
DpSize = Annotated[
    int | None, typer.Option(min=1, help="Data-parallel ranks. Default: plan.reference_ranks.")
]
MicroSteps = Annotated[
    int | None,
    typer.Option(min=1, help="Micro-steps of a step. Default: plan.reference_micro_steps."),
]
