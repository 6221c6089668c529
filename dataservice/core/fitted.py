"""The cost model fitted from measured times: its coefficients, exact, and their JSON form.

t(pack) = patches * sum_images p + patches_squared * sum_images p^2
        + length_squared * sum_documents len^2 + constant,  p = patches of an image, unmerged.

Invariants: coefficients are integers in femtoseconds, so all replicas compute equal costs; the JSON
form keeps every digit; the version is a function of the coefficients alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from dataservice.errors import ConfigError

FS_PER_NS = 1_000_000
LARGEST_FS = 10**12
"""Of a coefficient that a sample's cost is made of: 1 ms. `sample_cost` counts on it."""
LARGEST_CONSTANT_FS = 10**18
TERMS = ("patches", "patches_squared", "length_squared")
"""What a pack's time is made of, besides a constant."""
_TERMS = (*TERMS, "constant")
_KEYS = ("model", "version", *(f"{term}_ns" for term in _TERMS))


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCost:
    """ConfigError for a coefficient out of range, all of them 0, or another fit's version."""

    patches_fs: int
    """Femtoseconds per patch."""
    patches_squared_fs: int
    """Femtoseconds per patch^2, summed over images."""
    length_squared_fs: int
    """Femtoseconds per token^2, summed over documents."""
    constant_fs: int
    """Femtoseconds per pack; no part of a sample's cost, for it is equal for all packs."""
    version: str
    """Of the fit, see `version_of`."""

    def __post_init__(self) -> None:
        for term, value in zip(_TERMS, self.coefficients_fs, strict=True):
            largest = LARGEST_CONSTANT_FS if term == "constant" else LARGEST_FS
            if not 0 <= value <= largest:
                raise ConfigError(
                    f"{term}_ns: {_ns_text(value)} should be from 0 to {_ns_text(largest)} "
                    "nanoseconds; look at the unit of the times it was fitted from"
                )
        if not any(self.coefficients_fs[:3]):
            raise ConfigError(
                f"{', '.join(_KEYS[2:5])}: all 0, so every pack costs the same; "
                "one of them has to be above 0; look at the unit of the times they were fitted from"
            )
        expected = version_of(*self.coefficients_fs)
        if self.version != expected:
            raise ConfigError(
                f"version: {self.version!r} is not that of these coefficients, {expected!r}; after "
                "a change by hand, remove it or write the latter"
            )

    @classmethod
    def of(
        cls,
        *,
        patches_fs: int,
        patches_squared_fs: int,
        length_squared_fs: int,
        constant_fs: int,
    ) -> Self:
        """With the version that belongs to the coefficients."""
        return cls(
            patches_fs=patches_fs,
            patches_squared_fs=patches_squared_fs,
            length_squared_fs=length_squared_fs,
            constant_fs=constant_fs,
            version=version_of(patches_fs, patches_squared_fs, length_squared_fs, constant_fs),
        )

    @property
    def coefficients_fs(self) -> tuple[int, int, int, int]:
        return (
            self.patches_fs,
            self.patches_squared_fs,
            self.length_squared_fs,
            self.constant_fs,
        )

    def to_json(self) -> str:
        """What `from_json` reads, in nanoseconds for people."""
        numbers = zip(_TERMS, self.coefficients_fs, strict=True)
        lines = [
            '"model": "fitted"',
            f'"version": "{self.version}"',
            *(f'"{term}_ns": {_ns_text(value)}' for term, value in numbers),
        ]
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, name: str) -> Self:
        """Rounds to femtoseconds, half to even; `version` may be missing.

        ConfigError names `name` (the file), field, value and remedy.
        """
        fields = _object(text, name)
        for key in fields:
            if key not in _KEYS:
                raise ConfigError(f"{name}: {key}: unknown key; known are {', '.join(_KEYS)}")
        if fields.get("model") != "fitted":
            raise ConfigError(
                f"{name}: model: {fields.get('model')!r} should be 'fitted'; "
                "write the file with `dataservice fit-cost TIMINGS --out FILE`"
            )
        values = {f"{term}_fs": _femtoseconds(fields, f"{term}_ns", name) for term in _TERMS}
        try:
            version = fields.get("version", version_of(*values.values()))
            return cls(**values, version=version)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def version_of(*coefficients_fs: int) -> str:
    """12 hex digits."""
    return hashlib.sha256(",".join(map(str, coefficients_fs)).encode()).hexdigest()[:12]


def _ns_text(value_fs: int) -> str:
    whole, rest = divmod(abs(value_fs), FS_PER_NS)
    return f"{'-' if value_fs < 0 else ''}{whole}.{rest:06}".rstrip("0").removesuffix(".")


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(text, parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, ArithmeticError):
        raise ConfigError(f"{name}: has a number too large to be read; correct it") from None
    except RecursionError:
        raise ConfigError(
            f"{name}: is nested too deeply; it should be one JSON object with {', '.join(_KEYS)}"
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: should be one JSON object with {', '.join(_KEYS)}")
    return fields


def _femtoseconds(fields: dict[str, Any], key: str, name: str) -> int:
    value = fields.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | Decimal)  # NaN and Infinity are floats here
        or not -LARGEST_CONSTANT_FS <= value <= LARGEST_CONSTANT_FS
    ):
        found = "is missing" if key not in fields else f"is {str(value)[:40]}"
        raise ConfigError(f"{name}: {key}: {found}, should be a number of nanoseconds")
    return round(value * FS_PER_NS)
