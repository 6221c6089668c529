"""The `dataservice` command in process."""

from __future__ import annotations

import pytest

from dataservice.cli import main


def run(*arguments: object) -> int:
    """Its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code
