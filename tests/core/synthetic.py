"""An index without files: rows of any number, computed from their number by integer hashing.

Invariants: a row depends on (source's salt, row) alone; nothing is stored, so 10 million rows cost
nothing; integers only, so golden plans made with it hold on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dataservice.core.settings import Kind
from dataservice.core.tables import SampleColumns, SourceStats

_SIDES = np.array([40, 97, 160, 224, 336, 448, 512, 640, 800, 1024, 1600, 2400], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticSource:
    name: str
    num_samples: int
    num_shards: int = 4
    kind: str = "text"
    """"text", "caption" (one image) or "mixed" (0 to 3 images)."""
    scale: int = 1
    """Multiplies text lengths; 0 makes every sample empty of text."""
    salt: int = 0
    markup: int = 0
    """Text tokens of each image's start and end; above 0 images stand in the text."""
    docs: int = 1
    """Most documents of a sample."""


def hashed(values: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """SplitMix64 of (value, salt)."""
    mixed = values.astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 1) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _counts(source: SyntheticSource, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Images of each row."""
    if source.kind == "mixed":
        return _bits(hashed(rows, source.salt * 16 + 1), 24, 4)
    return np.full(len(rows), int(source.kind == "caption"), dtype=np.int64)


def _bits(bits: NDArray[np.uint64], shift: int, modulus: int) -> NDArray[np.int64]:
    return ((bits >> np.uint64(shift)) % np.uint64(modulus)).astype(np.int64)


def _runs(sources: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(source, first row, one past its last) of each run of rows of one source."""
    edges = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
    return [(int(sources[a]), a, b) for a, b in itertools.pairwise(edges) if a < b]


@cache
def _is_text(source: SyntheticSource) -> NDArray[np.bool_]:
    return _counts(source, np.arange(source.num_samples)) == 0


class SyntheticIndex:
    """An IndexView; lengths are spread over 16..8,000 tokens (mean about 700 at scale 1)."""

    def __init__(self, sources: Sequence[SyntheticSource], fingerprint: str = "synthetic") -> None:
        self.fingerprint = fingerprint
        self._sources = tuple(sources)
        self.sources = tuple(self._stats(source) for source in sources)
        self.rows_read = 0

    def columns(self, source: int | NDArray[np.int64], rows: NDArray[np.int64]) -> SampleColumns:
        if isinstance(source, int):
            return self._columns(source, rows)
        parts = [self._columns(of, rows[first:stop]) for of, first, stop in _runs(source)]
        counts = [np.zeros(1, dtype=np.int64), *(np.diff(part.image_offsets) for part in parts)]
        columns = {
            name: np.concatenate([counts[0][:0], *(getattr(part, name) for part in parts)])
            for name in (
                "text_tokens",
                "loss_tokens",
                "width",
                "height",
                "text_before",
                "markup",
                "num_docs",
            )
        }
        return SampleColumns(image_offsets=np.cumsum(np.concatenate(counts)), **columns)

    def _columns(self, source: int, rows: NDArray[np.int64]) -> SampleColumns:
        self.rows_read += len(rows)
        of = self._sources[source]
        bits = hashed(rows, of.salt * 16 + 1)
        text = _bits(bits, 0, 16) + 16 << _bits(bits, 8, 256) * 9 // 256
        text = np.minimum(text * of.scale, 8_000 * of.scale)
        counts = _counts(of, rows)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        sizes = hashed(np.repeat(rows, counts) * 8 + place, of.salt * 16 + 2)
        before = np.repeat(text, counts) * (place + 1) // np.repeat(counts + 1, counts)
        return SampleColumns(
            text_tokens=text + of.markup * counts,
            loss_tokens=text * 3 // 4,
            image_offsets=offsets,
            width=_SIDES[_bits(sizes, 0, len(_SIDES))],
            height=_SIDES[_bits(sizes, 16, len(_SIDES))],
            text_before=(before + of.markup * place) * (of.markup > 0),
            markup=np.full(len(place), of.markup, dtype=np.int64),
            num_docs=1 + _bits(bits, 40, of.docs),
        )

    def rows_of_kind(
        self, source: int | NDArray[np.int64], kind: Kind, numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        runs = [(source, 0, len(numbers))] if isinstance(source, int) else _runs(source)
        rows = np.empty_like(numbers)
        for of, first, stop in runs:
            text = _is_text(self._sources[of])
            found = np.flatnonzero(text if kind == "text" else ~text)
            rows[first:stop] = found[numbers[first:stop]]
        return rows

    @staticmethod
    def _stats(source: SyntheticSource) -> SourceStats:
        n, k = source.num_samples, source.num_shards
        ends = [i * n // k for i in range(k + 1)]
        shards = tuple(itertools.pairwise(ends))
        samples = tuple(stop - start for start, stop in shards)
        text = {
            "text": lambda: samples,
            "caption": lambda: (0,) * k,
            "mixed": lambda: tuple(int(_is_text(source)[slice(*shard)].sum()) for shard in shards),
        }
        return SourceStats(
            name=source.name,
            shard_names=tuple(f"{source.name}-{i:05d}.jsonl" for i in range(k)),
            shard_samples=samples,
            shard_text_samples=text[source.kind](),
            fingerprint=f"{source.salt}:{source.kind}:{source.scale}",
        )
