"""Samples in memory, for plans in tests: texts with images, made up or the user's own.

Invariants: the same arguments give the same samples, tokens and pixels; tokens are bytes of UTF-8
and the special tokens of `synthetic`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.settings import Kind
from dataservice.core.tables import SampleColumns, SourceStats
from dataservice.core.vision import VisionRules, num_rows, planned_size
from trainer_client.batch import IGNORE
from trainer_client.testing.synthetic import IMAGE, PAD, VISION_END, VISION_START

Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]

PLACEHOLDER = "<image>"
_MARKUP = 2  # tokens of an image beside its own: its start and end
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FakeSample:
    """`<image>` in the prompt or the answer stands for the next of `images`."""

    prompt: str = ""
    """Without loss."""
    answer: str = ""
    """With loss, as has the token that ends the sample."""
    images: tuple[tuple[int, int] | Pixels, ...] = ()
    """(width, height) of an image whose pixels are made up; or uint8 [height, width, 3], scaled to
    its planned size by nearest neighbours."""

    def __post_init__(self) -> None:
        places = (self.prompt + self.answer).count(PLACEHOLDER)
        if places != len(self.images):
            raise ValueError(f"{places} times {PLACEHOLDER} in the text, {len(self.images)} images")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) of each image."""
        return [
            image if isinstance(image, tuple) else (image.shape[1], image.shape[0])
            for image in self.images
        ]

    def tokens(self, image_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """(ids, labels) with so many tokens of each image; the first label is masked."""
        ids: list[int] = []
        labels: list[int] = []
        sizes = iter(image_tokens)
        for text, loss in ((self.prompt, False), (self.answer, True)):
            for number, part in enumerate(text.split(PLACEHOLDER)):
                if number:
                    image = [VISION_START, *[IMAGE] * next(sizes), VISION_END]
                    ids += image
                    labels += [IGNORE] * len(image)
                letters = list(part.encode())
                ids += letters
                labels += letters if loss else [IGNORE] * len(letters)
        return [*ids, PAD], [IGNORE, *[*labels, PAD][1:]]


def made_up_samples(
    count: int, *, seed: int = 0, image_share: float = 0.5, max_side: int = 40
) -> list[FakeSample]:
    """Questions and answers of unequal length; one to three images of up to `max_side` pixels a
    side in a share of them."""
    rng = np.random.Generator(np.random.Philox(seed))
    with_images = rng.permutation(count) < round(count * image_share)
    samples = []
    for images in with_images.tolist():
        number = int(rng.integers(1, 4)) if images else 0
        prompt, answer = (
            bytes(rng.choice(_LETTERS, rng.integers(*length))).decode()
            for length in ((4, 40), (4, 80))
        )
        sides = rng.integers(8, max_side + 1, (number, 2)).tolist()
        samples.append(
            FakeSample(
                prompt=PLACEHOLDER * number + prompt,
                answer=answer,
                images=tuple((width, height) for width, height in sides),
            )
        )
    return samples


def pixels_of(
    sample: FakeSample, number: int, rules: VisionRules, limit: int, key: Sequence[int]
) -> tuple[Pixels, tuple[int, int, int]]:
    """(rows of `pixel_values`, grid) of an image; made-up pixels follow from the integers `key`."""
    width, height = sample.sizes[number]
    high, wide = planned_size(height, width, rules, limit)
    rows, image = num_rows(high, wide, rules), sample.images[number]
    grid = (1, high // rules.side, wide // rules.side)
    if isinstance(image, tuple):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*key, number])))
        return rng.integers(0, 256, (rows, 3 * rules.side**2), np.uint8), grid
    parts = [_patches(_scaled(image, high, wide), rules)]
    if rows > grid[1] * grid[2]:
        parts.append(_patches(_scaled(image, rules.side, rules.side), rules))
    return np.concatenate(parts), grid


def _scaled(image: Pixels, height: int, width: int) -> Pixels:
    rows = np.arange(height) * image.shape[0] // height
    columns = np.arange(width) * image.shape[1] // width
    return image[rows[:, None], columns]


def _patches(image: Pixels, rules: VisionRules) -> Pixels:
    """[H, W, 3] -> [rows, 3 * side * side], in the order of `pixel_values`."""
    side, group = rules.side, rules.group
    high, wide = image.shape[0] // (side * group), image.shape[1] // (side * group)
    blocks = image.reshape(high, group, side, wide, group, side, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * side**2)


class SampleTable:
    """A `dataservice.core.tables.IndexView` of samples by source; a source is one shard."""

    def __init__(self, sources: Mapping[str, Sequence[FakeSample]]) -> None:
        self.samples = [list(samples) for samples in sources.values()]
        """By source number."""
        everything = [sample for samples in self.samples for sample in samples]
        self._first = np.array([0, *accumulate(map(len, self.samples))])
        self._all = _columns(everything)
        counts = np.diff(self._all.image_offsets)
        self._of_kind: dict[Kind, Ints] = {
            "text": np.flatnonzero(counts == 0),
            "vision": np.flatnonzero(counts > 0),
        }
        self.fingerprint = "samples in memory"
        self.sources = tuple(
            self._stats(name, number, counts) for number, name in enumerate(sources)
        )

    def columns(self, source: int | Ints, rows: Ints) -> SampleColumns:
        return self._all.take(self._first[source] + rows)

    def rows_of_kind(self, source: int | Ints, kind: Kind, numbers: Ints) -> Ints:
        found, first = self._of_kind[kind], self._first[source]
        rows: Ints = found[np.searchsorted(found, first) + numbers] - first
        return rows

    def _stats(self, name: str, number: int, counts: Ints) -> SourceStats:
        samples = self.samples[number]
        texts = int((counts[self._first[number] : self._first[number + 1]] == 0).sum())
        content = hashlib.sha256()
        for sample in samples:
            content.update(repr((sample.prompt, sample.answer, sample.sizes)).encode())
            for image in sample.images:
                content.update(b"" if isinstance(image, tuple) else image.tobytes())
        return SourceStats(
            name=name,
            shard_names=("memory",),
            shard_samples=(len(samples),),
            shard_text_samples=(texts,),
            fingerprint=content.hexdigest(),
        )


def _columns(samples: Sequence[FakeSample]) -> SampleColumns:
    rows: list[tuple[int, int]] = []
    before: list[int] = []
    for sample in samples:
        ids, labels = sample.tokens([0] * len(sample.images))
        rows.append((len(ids), sum(label != IGNORE for label in labels)))
        before += [place for place, token in enumerate(ids) if token == VISION_START]
    sizes = _table([size for sample in samples for size in sample.sizes])
    counts = _table(rows)
    return SampleColumns(
        text_tokens=counts[:, 0],
        loss_tokens=counts[:, 1],
        image_offsets=np.array([0, *accumulate(len(sample.images) for sample in samples)]),
        width=sizes[:, 0],
        height=sizes[:, 1],
        text_before=np.array(before, np.int64),
        markup=np.full(len(sizes), _MARKUP),
    )


def _table(pairs: Sequence[tuple[Any, Any]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)
