"""Packs that a command builds, as they are told: a line of JSON each, or a table at the end.

Invariants: a line is out as soon as its pack is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson
import typer
from rich import box
from rich.table import Table

from dataservice.cli.consoles import wide_console
from dataservice.cli.progress import Show, progress

_COLUMNS = ("micro", "rank", "pack", "number", "tokens", "loss\ntokens", "images", "holes")
DIGITS = 12


def show_packs(
    command: str,
    build: Callable[[Show], Iterable[dict[str, Any]]],
    *,
    of: str,
    how: str,
    as_json: bool,
) -> None:
    """`build` gives them as `pack_folder.described` does; `of` and `how` make the table's title,
    with their number between."""
    rows = []
    with progress(command, "packs") as show:
        for row in build(show):
            if as_json:
                typer.echo(orjson.dumps(row))
            else:
                rows.append(row)
    if not as_json:
        wide_console().print(packs_table(f"{of}: {len(rows)} packs, {how}", rows))


def packs_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One row a pack."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    table.add_column("samples", no_wrap=True, ratio=1)
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("micro_step", "dp_rank", "pack_id", "number")),
            *(f"{row[name]:,}" for name in ("tokens", "loss_tokens", "num_images")),
            f"{len(row['holes']):,}",
            row["digest"][:DIGITS],
            f"{len(row['sample_keys'])}: {', '.join(row['sample_keys'])}",
        )
    return table
