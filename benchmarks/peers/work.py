"""The work that every loader does: a sample becomes tokens and patches, samples become packs.

Invariants: only the decode differs from loader to loader; a picture is written straight into its
pack's buffer; packs are filled in the order of the samples, each closed by the first that does not
fit; a text longer than a pack is cut into pack-long pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.vision import VisionRules, target_size
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.probe import probe
from dataservice.storage.records import RecordReader

Column = Literal["same", "best"]
"""Everyone with our decoder, exact, in order; or everyone at their best."""
PACK_LENGTH = 8192
RULES = VisionRules()
Batch = dict[str, Any]
Array = NDArray[Any]


class Entry(NamedTuple):
    """Where a sample is stored."""

    records: str
    offset: int
    length: int
    archive: str
    """Of its images; "" where it has none."""
    members: list[str]


class Sample(NamedTuple):
    record: bytes
    """One line of JSON."""
    images: Sequence[bytes]
    """Files, in the order of the record."""


class Picture(NamedTuple):
    height: int
    """After the resize, in pixels; as the width a multiple of 28."""
    width: int
    write: Callable[[Array], None]
    """Writes the patches, uint8 [num_patches, 588]."""

    @property
    def num_patches(self) -> int:
        return self.height * self.width // RULES.patch**2


Decode = Callable[[bytes], Picture]
Started = Callable[[], None]
"""A loader calls it when all that stays up between two starts of a trainer is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a run is told."""

    loader: str
    column: Column
    group: str
    samples: int
    """Of the group."""
    folder: Path
    """Where the forms of the corpus lie."""
    workers: int = 2
    prefetch: int = 2
    """Batches a worker, where the loader has such a setting; 2 is torch's default."""
    service_workers: int = 1
    service_threads: int = 2

    @property
    def exact(self) -> bool:
        return self.column == "same"

    @property
    def mixed(self) -> Path:
        return self.folder / f"mixed-{self.group}.jsonl"

    @property
    def tars(self) -> Path:
        return self.folder / f"tars-{self.group}"

    @property
    def mds(self) -> Path:
        return self.folder / f"mds-{self.group}"

    @property
    def config(self) -> Path:
        return self.folder / f"service-{self.group}.yaml"

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Setup:
        given = json.loads(text)
        return cls(**given | {"folder": Path(given["folder"])})


def read_entries(path: Path) -> list[Entry]:
    return [Entry(*json.loads(line)) for line in path.read_text().splitlines()]


def planned_size(data: bytes) -> tuple[int, int, int, int]:
    """Height and width of a picture file as stored and upright, and after the resize."""
    header = probe(lambda start, size: data[start : start + size], len(data))
    return header.height, header.width, *resized(header.height, header.width)


def resized(height: int, width: int) -> tuple[int, int]:
    return target_size(
        height,
        width,
        patch=RULES.patch,
        merge=RULES.merge,
        min_pixels=RULES.min_pixels,
        max_pixels=RULES.max_pixels,
    )


class Encoded(NamedTuple):
    """A sample, or a piece of a text."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    pictures: Sequence[Picture]
    begins: bool = True
    """False for the later pieces of a text."""

    def pieces(self) -> Iterator[Encoded]:
        for start in range(0, len(self.ids), PACK_LENGTH):
            cut = slice(start, start + PACK_LENGTH)
            yield Encoded(self.ids[cut], self.labels[cut], self.pictures, start == 0)


class Encoder:
    """Tokens and patches of a sample. Thread-safe if its decode is."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._reader = RecordReader()
        self._renderer = TextRenderer.build(TextSettings())
        self.pad_token = self._renderer.pad_token

    def encode(self, sample: Sample) -> Encoded:
        return self.finish(sample.record, [self._decode(data) for data in sample.images])

    def finish(self, record: bytes, pictures: Sequence[Picture]) -> Encoded:
        """The sample, its pictures decoded already."""
        sizes = [picture.num_patches // RULES.merge**2 for picture in pictures]
        rendered = self._renderer.render(self._reader.read(record), sizes)
        return Encoded(rendered.ids, np.where(rendered.loss, rendered.ids, -100), pictures)

    def length(self, sample: Sample) -> int:
        """Tokens of the sample, from the headers of its images alone."""
        sizes = [planned_size(data)[2:] for data in sample.images]
        tokens = [high * wide // (RULES.patch * RULES.merge) ** 2 for high, wide in sizes]
        return len(self._renderer.render(self._reader.read(sample.record), tokens).ids)

    def packs(self, samples: Iterable[Encoded]) -> Iterator[Batch]:
        filling = Filling()
        for sample in samples:
            for pieces in filling.add(sample):
                yield self.build(pieces)
        if filling.pieces:
            yield self.build(filling.pieces)

    def build(self, pieces: Sequence[Encoded]) -> Batch:
        return build(pieces, self.pad_token)


class Filling:
    """The pack that is being filled."""

    def __init__(self) -> None:
        self.pieces: list[Encoded] = []
        self._tokens = 0

    def add(self, sample: Encoded) -> Iterator[list[Encoded]]:
        """Yields the packs that are closed by it."""
        for piece in sample.pieces():
            if self._tokens + len(piece.ids) > PACK_LENGTH:
                yield self.pieces
                self.pieces, self._tokens = [], 0
            self.pieces.append(piece)
            self._tokens += len(piece.ids)


def build(pieces: Sequence[Encoded], pad_token: int) -> Batch:
    """One pack, in the names, dtypes and shapes of `trainer_client.MicroBatch`; numpy arrays.

    Besides: num_samples (that begin in it), num_tokens (padding not counted).
    """
    lengths = [len(piece.ids) for piece in pieces]
    used = sum(lengths)
    bounds = np.cumsum([0, *lengths, *([PACK_LENGTH - used] if used < PACK_LENGTH else [])])
    segments = np.arange(len(bounds) - 1, dtype=np.int32)
    segments[len(pieces) :] = -1
    ids = np.full(PACK_LENGTH, pad_token, np.int64)
    labels = np.full(PACK_LENGTH, -100, np.int64)
    for piece, first in zip(pieces, bounds.tolist(), strict=False):
        ids[first : first + len(piece.ids)] = piece.ids
        labels[first + 1 : first + len(piece.ids)] = piece.labels[1:]
    pictures = [(owner, p) for owner, piece in enumerate(pieces) for p in piece.pictures]
    ends = np.cumsum([0, *(p.num_patches for _, p in pictures)]).tolist()
    pixels = np.empty((ends[-1], RULES.patch_bytes), np.uint8)
    for (_, picture), start, end in zip(pictures, ends, ends[1:], strict=False):
        picture.write(pixels[start:end])
    grids = [[1, p.height // RULES.patch, p.width // RULES.patch] for _, p in pictures]
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": np.arange(PACK_LENGTH) - np.repeat(bounds[:-1], np.diff(bounds)),
        "doc_ids": np.repeat(segments, np.diff(bounds)),
        "cu_seqlens": bounds.astype(np.int32),
        "pixel_values": pixels,
        "image_grid_thw": np.array(grids, np.int64).reshape(-1, 3),
        "image_doc_ids": np.array([owner for owner, _ in pictures], np.int32),
        "num_samples": sum(piece.begins for piece in pieces),
        "num_tokens": used,
    }


def as_tensors(batch: Batch) -> Batch:
    import torch

    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }
