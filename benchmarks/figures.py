"""A measured figure of a benchmark with what it has to reach, and the machine it is measured on."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    target: str = ""
    """In words; empty when there is none."""
    reached: bool | None = None
    """None when there is no target."""
    note: str = ""


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else 'unknown CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, load {os.getloadavg()[0]:.2f} at the start"
    )


def show(figure: Figure) -> None:
    mark = {None: "    ", True: "ok  ", False: "MISS"}[figure.reached]
    value = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
    target = f" (to reach: {figure.target})" if figure.target else ""
    print(f"{mark} {figure.name}: {value} {figure.unit}{target}")
    if figure.note:
        print(textwrap.indent(textwrap.fill(figure.note, 92), " " * 9))
    sys.stdout.flush()


def show_reached(figures: Iterable[Figure]) -> bool:
    """Says how many targets are reached; whether all are."""
    aimed = [figure for figure in figures if figure.reached is not None]
    reached = sum(bool(figure.reached) for figure in aimed)
    print(f"\nFigures to reach: {reached} of {len(aimed)}")
    return reached == len(aimed)
