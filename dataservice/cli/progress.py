"""How long work looks on a terminal: how much is done, how fast, and the time left.

Invariants: on stderr, and nothing at all where that is no terminal; gone when the work ends, also
by an error; `no_progress` is what stands in for it where nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Show = Callable[[float, float | None, str], None]
"""Is told what is done, of how much (None: nobody knows), and a word on it."""


def no_progress(done: float, total: float | None, said: str) -> None:
    """Shows nothing."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[Show]:
    """A bar for the time of the block. `unit`, in the plural, is what is counted; "bytes" are
    shown as MB and the like."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, counted="", said="")

        def show(done: float, total: float | None, said: str) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            counted = counted_text(done, total, done / elapsed if elapsed else 0.0, unit)
            bar.update(task, total=total, completed=done, counted=counted, said=said)

        yield show


def counted_text(done: float, total: float | None, rate: float, unit: str) -> str:
    """Such as "12 of 40 packs, 3.1 a second"."""
    if unit == "bytes":
        of = "" if total is None else f" of {decimal(round(total))}"
        return f"{decimal(round(done))}{of}, {decimal(round(rate))}/s"
    of = "" if total is None else f" of {total:,.0f}"
    return f"{done:,.0f}{of} {unit}, {rate:,.1f} a second"
