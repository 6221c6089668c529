"""Reads and writes the file that `plan.cost_file` names: a fitted cost model."""

from __future__ import annotations

import os
from typing import BinaryIO

from dataservice.core.fitted import FittedCost
from dataservice.errors import ConfigError
from dataservice.storage.tables import write_atomically


def load_cost_file(path: str | os.PathLike[str]) -> FittedCost:
    """ConfigError names file, field, value and remedy."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name}: cannot be read: {error}; `dataservice fit-cost TIMINGS --out {name}` "
            "writes one"
        ) from error
    return FittedCost.from_json(text, name=name)


def write_cost_file(path: str, cost: FittedCost) -> None:
    """A file that is there is replaced as a whole. ConfigError where none can be written."""

    def write(file: BinaryIO) -> None:
        file.write(cost.to_json().encode())

    try:
        write_atomically(os.path.abspath(path), write)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
