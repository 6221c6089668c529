"""An index without files: rows of any number, computed from their number by integer hashing.

Invariants: a row depends on (source's salt, row) alone; nothing is stored, so 10 million rows cost
nothing; integers only, so golden plans made with it hold on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def hashed(values: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """SplitMix64 of (value, salt)."""
    mixed = values.astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 1) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class SyntheticIndex:
    """An IndexView; lengths are spread over 16..8,000 tokens (mean about 700 at scale 1)."""

    def __init__(self, sources: Sequence[SyntheticSource], fingerprint: str = "synthetic") -> None:
        self.fingerprint = fingerprint
        self._sources = tuple(sources)
        self.sources = tuple(self._stats(source) for source in sources)
        self.rows_read = 0

    def columns(self, source: int, rows: NDArray[np.int64]) -> SampleColumns:
        self.rows_read += len(rows)
        of = self._sources[source]
        bits = hashed(rows, of.salt * 16 + 1)
        text = self._bits(bits, 0, 16) + 16 << self._bits(bits, 8, 256) * 9 // 256
        text = np.minimum(text * of.scale, 8_000 * of.scale)
        counts = {
            "text": np.zeros(len(rows), dtype=np.int64),
            "caption": np.ones(len(rows), dtype=np.int64),
            "mixed": self._bits(bits, 24, 4),
        }[of.kind]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        image = np.repeat(rows, counts) * 8 + (
            np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        )
        sizes = hashed(image, of.salt * 16 + 2)
        return SampleColumns(
            text_tokens=text,
            loss_tokens=text * 3 // 4,
            image_offsets=offsets,
            width=_SIDES[self._bits(sizes, 0, len(_SIDES))],
            height=_SIDES[self._bits(sizes, 16, len(_SIDES))],
        )

    @staticmethod
    def _bits(bits: NDArray[np.uint64], shift: int, modulus: int) -> NDArray[np.int64]:
        return ((bits >> np.uint64(shift)) % np.uint64(modulus)).astype(np.int64)

    @staticmethod
    def _stats(source: SyntheticSource) -> SourceStats:
        n, k = source.num_samples, source.num_shards
        return SourceStats(
            name=source.name,
            shard_names=tuple(f"{source.name}-{i:05d}.jsonl" for i in range(k)),
            shard_samples=tuple((i + 1) * n // k - i * n // k for i in range(k)),
            fingerprint=f"{source.salt}:{source.kind}:{source.scale}",
        )
