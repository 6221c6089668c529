"""One measured figure of a benchmark, with what it has to reach."""

from __future__ import annotations

from dataclasses import dataclass


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
