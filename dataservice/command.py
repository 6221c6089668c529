"""What the `dataservice` command starts: the command line, or a word on what is not installed.

Invariants: imports nothing that a trainer's install lacks before it can say so.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from dataservice import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dataservice"):
            raise
        sys.stderr.write(
            f"error: the dataservice command needs {error.name}, which a trainer's install lacks: "
            "pip install '.[service]' in the repository\n"
        )
        sys.exit(2)
    cli.main()
