"""The status of a running service for people: whatever the coordinator reports, laid out.

Invariants: every value of the report is shown; its names are the coordinator's, not known here.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_status(report: dict[str, Any], console: Console) -> None:
    """Plain values first, then a table for each section."""
    plain = {name: value for name, value in report.items() if not _is_section(value)}
    console.print(_pairs("", plain))
    for name, value in report.items():
        if _is_section(value):
            console.print(_pairs(name, value) if isinstance(value, dict) else _rows(name, value))


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items()) or "-"
    return str(value)


def _pairs(name: str, values: dict[str, Any]) -> Table:
    table = Table(title=_words(name) or None, title_justify="left", show_header=False)
    for key, value in values.items():
        table.add_row(_words(str(key)), _text(value))
    return table


def _rows(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=_words(name) or None, title_justify="left")
    for column in columns:
        table.add_column(_words(column))
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    return table
