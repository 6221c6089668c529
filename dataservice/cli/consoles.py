"""Where tables are drawn."""

from __future__ import annotations

import sys

from rich.console import Console

WIDEST_TABLE = 160


def wide_console() -> Console:
    """As wide as the terminal; WIDEST_TABLE characters where stdout is none."""
    return Console(width=None if sys.stdout.isatty() else WIDEST_TABLE)
