"""Reads files of measured times, JSONL or CSV, for `dataservice fit-cost`.

Invariants: every row of every file is used or refused, by file, line, field and value; columns that
a fit does not need are not looked at. The vision part's own time is used where all rows have it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dataservice.core.fit import LARGEST_TERM, SECONDS
from dataservice.core.fitted import TERMS
from dataservice.errors import ConfigError

TIME_UNITS = {"ms": 1e-3, "seconds": 1.0}
_NEEDED = f"{', '.join(TERMS)}, and ms or seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    terms: NDArray[np.float64]
    """[3, N] in the order of TERMS."""
    seconds: NDArray[np.float64]
    vision_seconds: NDArray[np.float64] | None
    """Part of them, where every row says so."""


def read_timings(paths: Sequence[str]) -> Timings:
    """All rows of all files. ConfigError for what is not a row of times."""
    rows = [row for path in paths for row in _rows(path)]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(TERMS) + 2)
    vision = table[:, -1]
    return Timings(
        terms=table[:, : len(TERMS)].T,
        seconds=table[:, -2],
        vision_seconds=None if np.isnan(vision).any() else vision,
    )


def _rows(path: str) -> Iterator[list[float]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path}: is empty; a row has the fields {_NEEDED}")
    records = _jsonl(path, text) if text.lstrip()[0] == "{" else _csv(path, text)
    for where, record in records:
        yield _row(where, record)


def _jsonl(path: str, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: not JSON ({error}), got {line[:60]!r}; correct the line or "
                "delete it"
            ) from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: should be an object with the fields {_NEEDED}")
        yield f"{path}:{number}", record


def _csv(path: str, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] = []
    for cells in _cells(path, reader):
        where = f"{path}:{reader.line_num}"
        if not any(cells):
            continue
        if not header:
            header = [cell.strip() for cell in cells]
            _check_header(where, header)
        elif len(cells) != len(header):
            raise ConfigError(
                f"{where}: {len(cells)} cells under {len(header)} columns; correct the line or "
                "delete it"
            )
        else:
            yield where, dict(zip(header, cells, strict=True))


def _cells(path: str, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _check_header(where: str, header: Sequence[str]) -> None:
    for name in (*TERMS, *TIME_UNITS):
        if header.count(name) > 1:
            raise ConfigError(f"{where}: the column {name} stands here twice")
    if not {*TERMS} <= {*header}:
        raise ConfigError(
            f"{where}: the first line should name the columns, {_NEEDED} among them, got "
            f"{','.join(header)[:200]!r}"
        )


def _row(where: str, record: Mapping[str, Any]) -> list[float]:
    units = [name for name in TIME_UNITS if name in record]
    if len(units) != 1:
        found = "both" if units else "neither"
        raise ConfigError(f"{where}: should have either ms or seconds, has {found}")
    values = [_number(where, record, name, 0.0, LARGEST_TERM) for name in TERMS]
    unit = TIME_UNITS[units[0]]
    least, most = SECONDS
    time = _number(where, record, units[0], least / unit, most / unit)
    return [*values, time * unit, _vision_s(where, record)]


def _vision_s(where: str, record: Mapping[str, Any]) -> float:
    """NaN where the row does not say."""
    for name, unit in TIME_UNITS.items():
        if f"vision_{name}" in record:
            return _number(where, record, f"vision_{name}", 0.0, SECONDS[1] / unit) * unit
    return math.nan


def _number(where: str, record: Mapping[str, Any], name: str, least: float, most: float) -> float:
    if name not in record:
        raise ConfigError(f"{where}: {name} is missing; a row has the fields {_NEEDED}")
    value = record[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(
            f"{where}: {name}: {repr(value)[:60]} should be a number from {least:g} to {most:g}; "
            "correct the line or delete it"
        )
    return number
