"""Packs made up from a seed, in the form that workers send, for tests and trials.

Invariants: the same arguments give the same bytes; a pack is what `check_pack` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.wire.messages import SessionOpened
from trainer_client.batch import IGNORE, VisionInfo

PAD, VISION_START, VISION_END, IMAGE = 256, 259, 260, 261
FAKE_INFO = SessionOpened(
    ready=True,
    plan_digest="fake",
    pack_length=64,
    patch=2,
    merge=2,
    temporal_patch=2,
    mean=(0.5, 0.4, 0.3),
    std=(0.3, 0.25, 0.2),
    decoder="fake",
    vocab_size=262,
    pad_token=PAD,
    image_token=IMAGE,
)
"""What sessions of a FakeService look like: packs of 64 byte tokens, patches of 2 x 2 pixels."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FakePack:
    arrays: Arrays
    meta: dict[str, Any]
    """num_docs, sample_keys, holes; the service adds pack_id."""
    loss_tokens: int
    """As planned: a hole does not change it."""
    cost: int = 0

    @property
    def num_images(self) -> int:
        return len(self.arrays["image_grid_thw"])

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def synthetic_packs(
    count: int, *, seed: int = 0, image_share: float = 0.5, info: SessionOpened = FAKE_INFO
) -> list[FakePack]:
    """Packs of several short documents, some padding, images of unequal size in a share of them;
    documents begin at multiples of `info.align`."""
    rng = np.random.Generator(np.random.Philox(seed))
    with_images = rng.permutation(count) < round(count * image_share)
    return [_pack(f"pack{i}", rng, bool(images), info) for i, images in enumerate(with_images)]


def _pack(name: str, rng: np.random.Generator, images: bool, info: SessionOpened) -> FakePack:
    documents: list[list[int]] = []
    grids: list[tuple[int, int, int]] = []
    image_docs: list[int] = []
    length = 0
    while True:
        document, doc_grids = _document(rng, images, info)
        length += _places(document, info)
        if length > info.pack_length:
            break
        image_docs += [len(documents)] * len(doc_grids)
        grids += doc_grids
        documents.append(document)
    arrays = laid_out([(document, _labels(document)) for document in documents], info)
    num_docs = len(documents)
    grid = np.array(grids, np.int32).reshape(-1, 3)
    vision = VisionInfo.of(info)
    rows = vision.num_rows(grid)
    pixels = rng.integers(0, 256, (rows.sum(), 3 * vision.side**2), np.uint8)
    patches = rows * vision.row_patches
    return FakePack(
        arrays=arrays
        | {
            "pixel_values": pixels,
            "image_grid_thw": grid,
            "image_doc_ids": np.array(image_docs, np.int32),
        },
        meta={"num_docs": num_docs, "sample_keys": [f"{name}/{i}" for i in range(num_docs)]},
        loss_tokens=int((arrays["labels"] != IGNORE).sum()),
        cost=int((patches * (16 + (vision.row_patches if info.tile else patches))).sum()),
    )


def _labels(document: list[int]) -> list[int]:
    """Its tokens, without the first quarter and those of images."""
    asked = 1 + len(document) // 4
    return [IGNORE] * asked + [token if token < PAD else IGNORE for token in document[asked:]]


def _places(document: Sequence[int], info: SessionOpened) -> int:
    """That a document takes, filler with it."""
    return -(-len(document) // info.align) * info.align


def laid_out(documents: Sequence[tuple[list[int], list[int]]], info: SessionOpened) -> Arrays:
    """input_ids, labels, cu_seqlens and doc_lengths of a pack of these (tokens, labels)."""
    ids = np.full(info.pack_length, info.pad_token, np.int32)
    labels = np.full(info.pack_length, IGNORE, np.int32)
    bounds = [0]
    for tokens, wanted in documents:
        first = bounds[-1]
        ids[first : first + len(tokens)] = tokens
        labels[first : first + len(tokens)] = wanted
        bounds.append(first + _places(tokens, info))
    lengths = [len(tokens) for tokens, _ in documents]
    if bounds[-1] < info.pack_length:
        lengths.append(info.pack_length - bounds[-1])
        bounds.append(info.pack_length)
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": np.array(bounds, np.int32),
        "doc_lengths": np.array(lengths, np.int32),
    }


def _document(
    rng: np.random.Generator, images: bool, info: SessionOpened
) -> tuple[list[int], list[tuple[int, int, int]]]:
    tokens = rng.integers(0, PAD, rng.integers(4, 20)).tolist()
    grids: list[tuple[int, int, int]] = []
    for _ in range(int(rng.integers(1, 3)) if images else 0):
        group = 1 if info.tile else info.merge
        height, width = (group * int(side) for side in rng.integers(1, 4, 2))
        grids.insert(0, (1, height, width))  # as its tokens, before the one made already
        num_tokens = int(VisionInfo.of(info).image_tokens(np.array(grids[:1], np.int32))[0])
        tokens[2:2] = [VISION_START, *[IMAGE] * num_tokens, VISION_END]
    return tokens, grids


def with_hole(pack: FakePack, info: SessionOpened = FAKE_INFO) -> FakePack:
    """The pack as if its first image could not be read: zeros, no labels in that document."""
    arrays = {name: array.copy() for name, array in pack.arrays.items()}
    document = int(arrays["image_doc_ids"][0])
    start, stop = arrays["cu_seqlens"][document : document + 2]
    arrays["pixel_values"][: VisionInfo.of(info).num_rows(arrays["image_grid_thw"])[0]] = 0
    arrays["labels"][start:stop] = IGNORE
    hole = f"{pack.meta['sample_keys'][document]}#0: cannot be read"
    return replace(pack, arrays=arrays, meta=pack.meta | {"holes": [hole]})


def padding_pack(info: SessionOpened = FAKE_INFO) -> FakePack:
    """A pack without a document, as it fills the last step."""
    return FakePack(
        arrays=laid_out([], info)
        | {
            "pixel_values": np.zeros((0, 3 * VisionInfo.of(info).side ** 2), np.uint8),
            "image_grid_thw": np.zeros((0, 3), np.int32),
            "image_doc_ids": np.zeros(0, np.int32),
        },
        meta={"num_docs": 0, "sample_keys": []},
        loss_tokens=0,
    )
