"""What part of a window each source gets: exact shares from weights or repeats.

Invariants: shares are exact fractions that add up to 1; a source without a sample of the kind that
is planned, or with a weight of 0, has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import measure
from dataservice.core.limits import MAX_TEXT, exact_fraction
from dataservice.core.settings import Kind, PlanSettings
from dataservice.core.tables import IndexView, SourceStats
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

_SIZE_ROWS = 8_192
_LEAST_SIZE_ROWS = 256  # of a source, however many there are
_SIZE_RUN = 64
_SHARE_ROWS = 65_536
_ALL_SHARE_ROWS = 1 << 20
_LEAST_SHARE_ROWS = 512  # of a source, however many there are

Weights = dict[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedSource:
    number: int
    """In the index."""
    stats: SourceStats
    shard_samples: tuple[int, ...]
    """Of the kind that is planned."""
    part: Fraction
    """Its weight, in a finite run its repeat; above 0."""

    @property
    def num_samples(self) -> int:
        return sum(self.shard_samples)


def kind_samples(stats: SourceStats, kind: Kind | None) -> tuple[int, ...]:
    """Samples of a kind, None = all, by shard."""
    if kind is None:
        return stats.shard_samples
    if stats.shard_text_samples is None:
        raise ConfigError(
            f"plan.segregate: a lazy index does not know which samples of {stats.name!r} have "
            "images before it has counted them; set index: full, or leave segregate out"
        )
    if kind == "text":
        return stats.shard_text_samples
    if stats.shard_vision_samples is not None:
        return stats.shard_vision_samples
    pairs = zip(stats.shard_samples, stats.shard_text_samples, strict=True)
    return tuple(every - text for every, text in pairs)


def used_sources(
    settings: PlanSettings, index: IndexView, kind: Kind | None, weights: Weights
) -> list[UsedSource]:
    """The sources that give samples, by name; `weights` are repeats in a finite run."""
    known = {stats.name: (number, stats) for number, stats in enumerate(index.sources)}
    word = "repeat" if settings.epochs is not None else "weight"
    used = []
    for name in sorted(weights):
        if name not in known:
            raise ConfigError(
                f"sources: {name!r} is not in the index, which has {', '.join(sorted(known))}; "
                "build the index again or correct the name"
            )
        number, stats = known[name]
        part = _exact(word, name, weights[name])
        found = UsedSource(
            number=number, stats=stats, shard_samples=kind_samples(stats, kind), part=part
        )
        if part > 0 and found.num_samples > 0:
            used.append(found)
    return used


def base_weights(settings: PlanSettings) -> Weights:
    """By source name, of the settings themselves: repeats in a finite run."""
    names = [source.name for source in settings.sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"sources: {name!r} is given twice; names must be distinct")
    finite = settings.epochs is not None
    return {s.name: s.repeat if finite else s.weight for s in settings.sources}


def _exact(word: str, name: str, text: str | None) -> Fraction:
    where = f"sources: {word} of {name!r}"
    if text is None:
        raise ConfigError(f"{where} is missing; an endless run (epochs: null) needs one per source")
    try:
        value = exact_fraction(text)
    except ValueError as error:
        raise ConfigError(f"{where} is {text[:MAX_TEXT]!r}; it {error}") from None
    if value < 0:
        raise ConfigError(f"{where} is {text!r}; it must not be negative")
    return value


def shares_of(
    used: list[UsedSource], settings: PlanSettings, means: Means, rules: VisionRules
) -> dict[int, Fraction]:
    """Of the samples of a window, by source number; empty for no source."""
    if settings.epochs is not None:
        parts = {source.number: source.num_samples * source.part for source in used}
    else:
        parts = {source.number: source.part for source in used}
        if settings.weight_by == "tokens":
            found = means.of(used, rules)
            for source in used:
                if found[source.number] == 0:
                    raise ConfigError(
                        f"sources: {source.stats.name!r} is weighted by tokens, but the samples of "
                        f"it that were looked at have none ({source.num_samples} in all)"
                    )
                parts[source.number] /= found[source.number]
    total = sum(parts.values(), Fraction(0))
    return {number: part / total for number, part in parts.items()}


class Means:
    """Mean tokens of a sample: what a source's settings say, or found from some of its samples.

    Where shares depend on it these are up to 65,536 single samples of a source, evenly spaced, and
    of all sources of a phase a million. Where only lanes and windows do, they are up to 8,192 of
    all sources in runs of 64, which a lazy index counts at once.
    """

    def __init__(self, settings: PlanSettings, index: IndexView, kind: Kind | None) -> None:
        self._by_tokens = settings.epochs is None and settings.weight_by == "tokens"
        self._given = {source.name: source.mean_tokens for source in settings.sources}
        self._index = index
        self._kind = kind
        self._known: dict[tuple[int, int, int], Fraction] = {}

    def of(self, used: list[UsedSource], rules: VisionRules) -> dict[int, Fraction]:
        """By source number; `used` are the sources of a phase."""
        if self._by_tokens:
            most = max(_LEAST_SHARE_ROWS, min(_SHARE_ROWS, _ALL_SHARE_ROWS // len(used)))
        else:
            most = max(_LEAST_SIZE_ROWS, _SIZE_ROWS // len(used))
        found = {}
        for source in used:
            given = self._given.get(source.stats.name)
            key = (source.number, rules.limit, most)
            if given is None and key not in self._known:
                self._known[key] = self._mean(source, rules, most)
            found[source.number] = self._known[key] if given is None else Fraction(given)
        return found

    def over(
        self, used: list[UsedSource], shares: dict[int, Fraction], rules: VisionRules
    ) -> Fraction:
        """Of a window."""
        means = self.of(used, rules)
        return sum((share * means[number] for number, share in shares.items()), Fraction(0))

    def _mean(self, source: UsedSource, rules: VisionRules, most: int) -> Fraction:
        rows = spread_rows(source.num_samples, most, run=1 if self._by_tokens else _SIZE_RUN)
        if self._kind is not None:
            rows = self._index.rows_of_kind(source.number, self._kind, rows)
        measures = measure(self._index.columns(source.number, rows), rules=rules)
        return Fraction(int(measures.length.sum()), len(rows))


def spread_rows(total: int, most: int, *, run: int) -> NDArray[np.int64]:
    """int64: about `most` of the numbers below `total`, all where there are no more; otherwise in
    evenly spaced runs that begin at multiples of `run`."""
    if total <= most:
        return np.arange(total, dtype=np.int64)
    starts = np.arange(most // run, dtype=np.int64) * total // (most // run) // run * run
    rows: NDArray[np.int64] = (starts[:, None] + np.arange(run)).ravel()
    return rows[rows < total]
