"""How single values of the YAML file are read and printed: paths, sizes, exact numbers, secrets.

Invariants: a wrong value is a ValueError whose text completes "key: ..."; nothing is rounded.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction

from dataservice.core.limits import exact_fraction
from dataservice.masking import mask_urls

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)
_UNITS = {"": 1} | {
    prefix + infix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_TAKE = re.compile(r"all|(first|end|random):([0-9]+|[0-9]+(\.[0-9]+)?%)")
_STEPS = re.compile(r"([0-9]+):([0-9]+)")
_MOST_SHOWN = 10**15
_SECRET_KEY = re.compile(r"(^|_)(secret|password|passwd|credentials?|(?<!^image_)token|key)$", re.I)


def masked(key: str, value: object) -> object:
    """`value` as it may be printed: secrets by key name, and those inside URLs, become ***."""
    if _SECRET_KEY.search(key):
        return "***"
    if isinstance(value, str):
        return mask_urls(value)
    return value


def expand_path(value: str, base_dir: str) -> str:
    """`$VAR`, `${VAR}` and `~` replaced, then made absolute below `base_dir`; URLs stay URLs."""

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set (in {value!r})")
        return os.environ[name]

    expanded = _VARIABLE.sub(variable, value)
    if not expanded:
        raise ValueError(f"is empty{f' after {value!r} was expanded' if value else ''}")
    if "://" in expanded:
        return expanded
    expanded = os.path.expanduser(expanded)
    if expanded.startswith("~"):
        raise ValueError(f"no home directory is known for {expanded.split('/')[0]!r}")
    return os.path.normpath(os.path.join(base_dir, expanded))


def parse_size(value: object) -> object:
    """Bytes from an integer or a text such as "512 MiB" or "20 GB"."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError('should be a size in bytes, such as 1000000, "512 MiB" or "20 GB"')
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def exact(value: object) -> str:
    """A YAML number or text as the exact decimal or fraction that stands in the file."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError('should be a number or a fraction, such as 0.3 or "1/3"')
    if exact_fraction(str(value)) <= 0:
        raise ValueError("should be above 0; to leave a source out, take it off the list")
    return str(value)


def checked_take(value: object) -> str:
    """Which records of a source are used, as `SourceFiles.take`."""
    if isinstance(value, str) and _TAKE.fullmatch(value):
        return value
    amount = _amount(value)
    hint = f"; the first {amount} are first:{amount}" if amount else ""
    raise ValueError(f'should be all, first:N, end:N or random:N, N a number or as "10%"{hint}')


def _amount(value: object) -> str | None:
    """Of a number, share or text that says how many records, but not which; as `take` has it."""
    if isinstance(value, str):
        return value if _TAKE.fullmatch(f"first:{value}") else None
    if isinstance(value, float):
        return f"{100 * value:g}%" if 0 < value < 1 and "e" not in f"{100 * value:g}" else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_SHOWN
    return str(value) if is_count else None


def step_range(value: object) -> tuple[int, int] | None:
    """A and B of the text "A:B"."""
    if value is None:
        return None
    match = _STEPS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            'should be "A:B", steps A to B - 1, in quotes: YAML reads some of them as a number'
        )
    return int(match[1]), int(match[2])
