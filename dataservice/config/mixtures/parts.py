"""What a mixture file says of one data set, and how single values of such files are read.

Invariants: numbers stay exact; an error names the mixture file, the entry, the value and the
remedy; a key that has no effect here is reported, and one that may be misspelt is an error; a file
has at most MAX_ENTRIES entries, those of files that it names included.
"""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import yaml

from dataservice.config.values import expand_path
from dataservice.core.limits import exact_fraction
from dataservice.errors import ConfigError
from dataservice.storage.backends import literal_front

_LOG = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024**2
MAX_ENTRIES = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One data set of a mixture."""

    name: str
    """As the file has it."""
    records: str
    images: tuple[str, ...] = ()
    take: str = "all"
    mismatch: str = "reject"
    repeat: Fraction = Fraction(1)
    """How often an epoch reads what `take` leaves."""
    weight: Fraction | None = None
    """Share of the samples, relative to the other parts; None where the file gives none."""


@dataclass(kw_only=True, slots=True)
class Notes:
    """Of a file and those that it names."""

    entries: int = 0
    ignored: dict[str, set[str]] = field(default_factory=dict)
    """Keys without effect, with the entries that have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureFile:
    """A file being read."""

    name: str
    folders: tuple[str, ...]
    """Relative paths are below the first of them where something is there."""
    content: Any
    notes: Notes

    def error(self, where: str, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: {where}: {problem}" if where else f"{self.name}: {problem}"
        )

    def mapping(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.error(where, f"should be a mapping, got {_shown(value)}")
        return {str(key): inner for key, inner in value.items()}

    def items(self, value: object, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.error(where, f"should be a list with at least one item, got {_shown(value)}")
        return value

    def text(self, entry: Mapping[str, Any], key: str, where: str) -> str:
        """The text at a key that is required."""
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{where}.{key}", f"should be a text, got {_shown(value)}")
        return value.strip()

    def number(self, entry: Mapping[str, Any], key: str, where: str) -> Fraction | None:
        """The exact number above 0 at a key, None where it is missing or null."""
        value = entry.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise self.error(f"{where}.{key}", f"should be a number, got {_shown(value)}")
        try:
            number = exact_fraction(str(value))
        except ValueError as error:
            raise self.error(f"{where}.{key}", f"{error}, got {value}") from None
        if number <= 0:
            raise self.error(
                f"{where}.{key}",
                f"should be above 0, got {value}; to leave a part out, name the "
                "others in mixture.use",
            )
        return number

    def keys(
        self, entry: Mapping[str, Any], where: str, known: Collection[str], idle: Collection[str]
    ) -> None:
        """Notes the keys that are not `known`; `idle` ones are those of the format, without effect
        here. ConfigError for a key that may be a misspelt one."""
        self.notes.entries += 1
        if self.notes.entries > MAX_ENTRIES:
            raise self.error(where, f"the mixture has more than {MAX_ENTRIES:,} entries")
        for key in entry.keys() - set(known):
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            if close and key not in idle:
                raise self.error(f"{where}.{key}", f"unknown key; did you mean {close[0]}?")
            self.notes.ignored.setdefault(key, set()).add(where)

    def path(self, value: str, where: str) -> str:
        """Absolute, or a URL; below the first folder that has it, else below the first one."""
        try:
            found = [expand_path(value, folder) for folder in self.folders]
        except ValueError as error:
            raise self.error(where, str(error)) from None
        return next((path for path in found if "://" not in path and _exists(path)), found[0])

    def report(self) -> None:
        """Logs what was read over."""
        if self.notes.ignored:
            keys = ", ".join(
                f"{key} ({min(places)}{' and others' if len(places) > 1 else ''})"
                for key, places in sorted(self.notes.ignored.items())
            )
            _LOG.warning("mixture %s: these keys have no effect here: %s", self.name, keys)


def read_file(path: str, folders: tuple[str, ...], notes: Notes | None = None) -> MixtureFile:
    """Raises ConfigError for what is neither JSON (by its suffix) nor YAML."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mixture: {path} cannot be read: {error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"mixture: {path} is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        if path.endswith(".json"):
            content = json.loads(text, parse_float=Decimal, object_pairs_hook=_without_twins)
        else:
            content = _YamlWithoutTwins(text).get_single_data()
    except RecursionError:
        raise ConfigError(f"mixture: {path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"mixture: {path} is no {'JSON' if path.endswith('.json') else 'YAML'} file: {error}"
        ) from error
    return MixtureFile(name=path, folders=folders, content=content, notes=notes or Notes())


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twin!r} stands twice in one object; rename one of them")
    return found


class _YamlWithoutTwins(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
                raise ValueError(
                    f"the key {key.value!r} stands in line {line} and in line {lines[key.value]}; "
                    "rename one of them"
                )
        return super().construct_mapping(node, deep)


def percent(share: Fraction) -> str:
    """A share as percent in decimals, such as "12.5%"; at most 12 digits behind the point."""
    text = f"{share.numerator * 100 * 10**12 // share.denominator:013d}"
    return f"{text[:-12]}.{text[-12:]}".rstrip("0").rstrip(".") + "%"


def _exists(path: str) -> bool:
    return (
        os.path.lexists(path)
        or next(glob.iglob(literal_front(path), recursive=True), None) is not None
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
