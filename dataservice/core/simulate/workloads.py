"""Synthetic workloads: mixtures of many sources whose samples are computed from their row numbers.

Invariants: a sample depends on (mix, seed, source, row, pack length, max_pixels) alone; nothing is
stored, so a billion rows cost what ten do; hashing and table look-ups in integers decide every
value; a sample fits its pack under `vision`: an image that alone exceeds the pack is shrunk, images
that no longer fit are dropped from the end, text is cut to the room that is left.

The mixes (100,000 shuffled samples; tests hold the moments):

    text80    image-poor web text with rare heavy documents: 20 % of samples have images, which are
              11 % of the tokens at 8,192 tokens and 4 megapixels
    mostlyvl  91 % of samples have images, 57 % of the tokens
    gravity   32,768 tokens; text-only samples hold 80 % of the tokens; 90 % of images have up to 2
              megapixels, 10 % up to 16 (the setting of a public report by Trillion Labs)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import sum_groups
from dataservice.core.order import random_words
from dataservice.core.settings import Kind
from dataservice.core.simulate.mixes import MEGAPIXEL, MIXES, ROWS, Images, Mix, Part
from dataservice.core.tables import SampleColumns, SourceStats
from dataservice.core.vision import VisionRules, planned_sizes
from dataservice.errors import ConfigError

__all__ = [
    "MEGAPIXEL",
    "MIXES",
    "Generator",
    "SyntheticIndex",
    "correlated",
    "draw",
    "mix_named",
    "vision",
]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

PATCH, MERGE = 16, 2
_TOKEN_PIXELS = (PATCH * MERGE) ** 2
_SHARDS = 16  # of a source
_QUANTILES = 1 << 14
_COUNTS = 1 << 12
_UNIT = 1 << 12  # of fixed-point scales
_ASPECT_SIGMA = 0.32
_TEXT_SPREAD = 0.30
_LEAST_SIDE = 64


def vision(max_pixels: int) -> VisionRules:
    """The rules the workloads are made for: patches of 16 pixels, 2 x 2 of them a token."""
    return VisionRules(patch=PATCH, merge=MERGE, max_pixels=max_pixels)


# ---- samples of a row number --------------------------------------------------------------------


class Generator:
    """Samples of a mix by (source, row). Thread-safe: holds tables of about a megabyte."""

    def __init__(
        self, parts: Sequence[Part], *, key: str, pack_length: int, max_pixels: int, seed: int
    ) -> None:
        normal = _normal()
        self._pack_length = pack_length
        self._max_pixels = min(max_pixels, pack_length * _TOKEN_PIXELS)
        self._shrunk = self._max_pixels < max_pixels
        self._text = np.concatenate([_lognormal(normal, *part.text, math.inf) for part in parts])
        self._side = np.concatenate([_sides(normal, part.images) for part in parts])
        self._text_only = np.array([part.text_only for part in parts])
        self._count = np.concatenate([_counts(part.images) for part in parts])
        self._wide = np.rint(np.exp(normal * _ASPECT_SIGMA / 2) * _UNIT).astype(np.int64)
        self._high = _UNIT * _UNIT // self._wide
        self._part_of = np.repeat(np.arange(len(parts)), [part.sources for part in parts])
        self._text_scale = np.concatenate([_scales(part.sources, _TEXT_SPREAD) for part in parts])
        self._salt = random_words(len(self._part_of), seed, "workload", key)

    def columns(self, source: int | Ints, rows: Ints) -> SampleColumns:
        """`source`: one number for all rows, or int64 [N]."""
        part = self._part_of[source]
        bits = _mixed(rows.astype(np.uint64) + self._salt[source])
        text = self._text[part * _QUANTILES + _low(bits, _QUANTILES)]
        text = text * self._text_scale[source] // _UNIT
        counts = self._count[part * _COUNTS + _low(bits >> np.uint64(14), _COUNTS)]
        counts = np.where(_is_text(rows, self._text_only[part]), 0, counts)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        width, height = self._images(part, bits, counts, offsets)
        return self._fitted(text, offsets, width, height)

    def text_only_of(self, source: int | Ints) -> int | Ints:
        """`Part.text_only` of each source."""
        found: int | Ints = self._text_only[self._part_of[source]]
        return found

    def _images(
        self, part: int | Ints, bits: Words, counts: Ints, offsets: Ints
    ) -> tuple[Ints, Ints]:
        if offsets[-1] == 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        number = np.arange(1, offsets[-1] + 1) - np.repeat(offsets[:-1], counts)
        own = _mixed(np.repeat(bits, counts) + number.astype(np.uint64) * _STEP)
        base = part * _QUANTILES if np.ndim(part) == 0 else np.repeat(part * _QUANTILES, counts)
        side = self._side[base + _low(own, _QUANTILES)]
        turn = _low(own >> np.uint64(14), _QUANTILES)
        return side * self._wide[turn] // _UNIT, side * self._high[turn] // _UNIT

    def _fitted(self, text: Ints, offsets: Ints, width: Ints, height: Ints) -> SampleColumns:
        """Exact only for samples that a bound on their image tokens cannot clear."""
        half = PATCH * MERGE // 2
        most = np.minimum((width + half) * (height + half), self._max_pixels) // _TOKEN_PIXELS
        large = np.flatnonzero(text + sum_groups(most, offsets) > self._pack_length)
        if large.size:
            width, height, offsets = self._cut(large, text, offsets, width, height)
        return SampleColumns(
            text_tokens=text,
            loss_tokens=text * 3 // 4,
            image_offsets=offsets,
            width=width,
            height=height,
        )

    def _cut(
        self, large: Ints, text: Ints, offsets: Ints, width: Ints, height: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Cuts text of the `large` samples in place; their images are dropped from the end."""
        counts = np.diff(offsets)
        sizes = counts[large]
        ends = np.cumsum(sizes)
        images = np.arange(ends[-1]) + np.repeat(offsets[:-1][large] - (ends - sizes), sizes)
        high, wide = planned_sizes(height[images], width[images], vision(self._max_pixels))
        running = np.cumsum(high * wide // _TOKEN_PIXELS)
        before = np.concatenate([np.zeros(1, dtype=np.int64), running])[ends - sizes]
        fits = running - np.repeat(before, sizes) <= self._pack_length
        if self._shrunk:
            width, height = width.copy(), height.copy()
            width[images], height[images] = wide, high
        kept = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(fits)])
        kept_counts = kept[ends] - kept[ends - sizes]
        last = np.concatenate([np.zeros(1, dtype=np.int64), running])[ends - sizes + kept_counts]
        text[large] = np.minimum(text[large], self._pack_length - (last - before))
        if fits.all():
            return width, height, offsets
        counts[large] = kept_counts
        new_offsets = np.zeros_like(offsets)
        np.cumsum(counts, out=new_offsets[1:])
        stays = np.ones(len(width), dtype=bool)
        stays[images[~fits]] = False
        return width[stays], height[stays], new_offsets


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: Words) -> Words:
    """SplitMix64's output function."""
    words = words * _STEP
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def _low(words: Words, modulus: int) -> Ints:
    """The low bits, below a power of two."""
    return (words & np.uint64(modulus - 1)).astype(np.int64)


@cache
def _normal() -> NDArray[np.float64]:
    """Quantiles of the normal distribution, evenly spaced in probability."""
    of = NormalDist()
    return np.array([of.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)])


def _lognormal(
    normal: NDArray[np.float64], median: float, sigma: float, low: float, high: float
) -> Ints:
    return np.rint(np.clip(median * np.exp(sigma * normal), low, high)).astype(np.int64)


def _sides(normal: NDArray[np.float64], images: Images) -> Ints:
    """Pixels of the side of a square as large as the image."""
    median, least, most = (
        math.sqrt(megapixels * MEGAPIXEL)
        for megapixels in (images.median, images.least, images.most)
    )
    return _lognormal(normal, median, images.sigma / 2, max(least, _LEAST_SIDE), most)


def _counts(images: Images) -> Ints:
    shares = images.ratio ** np.arange(images.max_count)
    ends = np.rint(np.cumsum(shares) / shares.sum() * _COUNTS)
    return 1 + np.searchsorted(ends, np.arange(_COUNTS), side="right").astype(np.int64)


def _text_before(rows: Ints, text_only: int | Ints) -> Ints:
    """Samples without images among rows 0 .. row - 1."""
    before: Ints = rows * text_only // ROWS
    return before


def _is_text(rows: Ints, text_only: int | Ints) -> NDArray[np.bool_]:
    is_text: NDArray[np.bool_] = _text_before(rows + 1, text_only) > _text_before(rows, text_only)
    return is_text


def _scales(sources: int, spread: float) -> Ints:
    """Fixed-point factors, evenly spaced in the logarithm around 1."""
    place = (2 * np.arange(sources) + 1 - sources) / max(sources, 1)
    scales: Ints = np.rint(np.exp(spread * place) * _UNIT).astype(np.int64)
    return scales


# ---- an index, a shuffled mixture, a rank's stream ----------------------------------------------


def mix_named(mix: str) -> Mix:
    if mix not in MIXES:
        raise ConfigError(f"synthetic: {mix!r} is unknown; it must be one of {', '.join(MIXES)}")
    return MIXES[mix]


class SyntheticIndex:
    """An IndexView of 120 sources whose sizes follow the mix's shares. Thread-safe."""

    def __init__(
        self, mix: str, *, num_samples: int, pack_length: int, max_pixels: int, seed: int = 0
    ) -> None:
        parts = mix_named(mix).parts
        if num_samples < 1:
            raise ConfigError(f"synthetic: num_samples is {num_samples}; it must be at least 1")
        self.fingerprint = f"synthetic {mix} {seed} {pack_length} {max_pixels}"
        self._generator = _generator(mix, pack_length=pack_length, max_pixels=max_pixels, seed=seed)
        ends = np.rint(np.cumsum(_source_shares(parts)) * num_samples).astype(np.int64)
        self.sources = tuple(
            _stats(f"{part.name}-{i:02d}", int(size), part.text_only, self.fingerprint)
            for (part, i), size in zip(_numbered(parts), np.diff(ends, prepend=0), strict=True)
        )

    def columns(self, source: int | Ints, rows: Ints) -> SampleColumns:
        return self._generator.columns(source, rows)

    def rows_of_kind(self, source: int | Ints, kind: Kind, numbers: Ints) -> Ints:
        text_only = self._generator.text_only_of(source)
        if kind == "text":
            return -(-(numbers + 1) * ROWS // text_only) - 1
        return numbers * ROWS // (ROWS - text_only)


def draw(
    mix: str, count: int, *, pack_length: int, max_pixels: int, seed: int = 0
) -> SampleColumns:
    """`count` samples of the shuffled mixture."""
    generator = _generator(mix, pack_length=pack_length, max_pixels=max_pixels, seed=seed)
    return generator.columns(_chosen(mix, count, seed), np.arange(count, dtype=np.int64))


def correlated(
    mix: str,
    rank: int,
    ranks: int,
    count: int,
    open_shards: int,
    *,
    pack_length: int,
    max_pixels: int,
    seed: int = 0,
    shard_samples: int = 512,
) -> SampleColumns:
    """The first `count` samples of a rank that reads whole shards, each of one source.

    Rank r reads shards r, r + ranks, ...; `open_shards` of them are open at once, read in turns.
    """
    generator = _generator(mix, pack_length=pack_length, max_pixels=max_pixels, seed=seed)
    rounds = -(-count // (shard_samples * open_shards))
    own = rank + ranks * np.arange(rounds * open_shards, dtype=np.int64)
    source = _chosen(mix, ranks * rounds * open_shards, seed, "shards")[own]
    turns = (rounds, shard_samples, open_shards)
    shard = np.broadcast_to(own.reshape(rounds, 1, open_shards), turns).ravel()[:count]
    of = np.broadcast_to(source.reshape(rounds, 1, open_shards), turns).ravel()[:count]
    place = np.broadcast_to(np.arange(shard_samples)[None, :, None], turns).ravel()[:count]
    return generator.columns(of, shard * shard_samples + place)


def _generator(mix: str, *, pack_length: int, max_pixels: int, seed: int) -> Generator:
    of = mix_named(mix)
    return Generator(
        of.parts,
        key=mix,
        pack_length=pack_length,
        max_pixels=max_pixels,
        seed=of.first_seed + seed,
    )


def _numbered(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    return [(part, i) for part in parts for i in range(part.sources)]


def _source_shares(parts: Sequence[Part]) -> NDArray[np.float64]:
    of = np.array([part.share / part.sources for part, _ in _numbered(parts)])
    shares: NDArray[np.float64] = of / of.sum()
    return shares


def _chosen(mix: str, count: int, seed: int, *purpose: str) -> Ints:
    """Source numbers, int64 [count], each with the probability of its share."""
    of = mix_named(mix)
    ends = np.rint(np.cumsum(_source_shares(of.parts)) * (1 << 53)).astype(np.uint64)
    words = random_words(count, of.first_seed + seed, "workload sources", mix, *purpose)
    chosen = np.searchsorted(ends[:-1], words >> np.uint64(11), side="right")
    return chosen.astype(np.int64)


def _stats(name: str, size: int, text_only: int, fingerprint: str) -> SourceStats:
    shards = max(1, min(_SHARDS, size))
    ends = np.arange(shards + 1, dtype=np.int64) * size // shards
    return SourceStats(
        name=name,
        shard_names=tuple(f"{name}-{i:05d}.jsonl" for i in range(shards)),
        shard_samples=tuple(np.diff(ends).tolist()),
        shard_text_samples=tuple(np.diff(_text_before(ends, text_only)).tolist()),
        fingerprint=f"{fingerprint} {name} {size}",
    )
