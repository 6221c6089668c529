"""From received packs to the micro-batch a trainer sees: check, concatenate, derive.

Invariants: what does not fit together is refused with WireError before a tensor is made;
`pixel_values` of a single pack is a view of the received buffer, never a copy;
padding is its own segment of `cu_seqlens`, has doc_id -1 and no labels; the filler behind an
aligned document belongs to the document's segment, has doc_id -1 and no labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataservice.errors import WireError
from dataservice.wire.messages import SessionOpened

IGNORE = -100
"""A label without loss, as torch's cross_entropy has it."""
Arrays = Mapping[str, NDArray[Any]]

# name -> (dtype on the wire, number of dimensions)
PACK_ARRAYS = {
    "input_ids": (np.int32, 1),
    "labels": (np.int32, 1),
    "cu_seqlens": (np.int32, 1),
    "doc_lengths": (np.int32, 1),
    "pixel_values": (np.uint8, 2),
    "image_grid_thw": (np.int32, 2),
    "image_doc_ids": (np.int32, 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionInfo:
    """How pictures were cut, and what turns their bytes into what a vision model reads."""

    patch: int
    merge: int
    temporal_patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tile: int = 0
    """Side of a tile in pixels; 0: pictures are patches, not tiles."""
    thumbnail: bool = False
    """Whether a picture of several tiles has one more, the last."""
    tile_tokens: int = 0
    """Image tokens of a tile."""

    @property
    def side(self) -> int:
        """Of what a row of `pixel_values` holds, a patch or a tile, in pixels."""
        return self.tile or self.patch

    @property
    def row_patches(self) -> int:
        """Patches that a row of `pixel_values` holds."""
        return (self.side // self.patch) ** 2

    def num_rows(self, grid: NDArray[np.int32]) -> NDArray[np.int64]:
        """[N]: rows of `pixel_values` of images of these grids [N, 3]."""
        rows = grid.prod(axis=1, dtype=np.int64)
        return rows + (rows > 1) if self.thumbnail else rows

    def image_tokens(self, grid: NDArray[np.int32]) -> NDArray[np.int64]:
        """[N]: image tokens of such images."""
        rows = self.num_rows(grid)
        return rows * self.tile_tokens if self.tile else rows // self.merge**2

    @classmethod
    def of(cls, opened: SessionOpened) -> VisionInfo:
        return cls(
            patch=opened.patch,
            merge=opened.merge,
            temporal_patch=opened.temporal_patch,
            mean=opened.mean,
            std=opened.std,
            tile=opened.tile,
            thumbnail=opened.thumbnail,
            tile_tokens=opened.tile_tokens,
        )


class MicroBatch(dict[str, Any]):
    """What one rank computes in one forward and backward: k packs along the token axis.

    T tokens, D segments (documents, and each pack's padding), N images, P patches or tiles:

        input_ids, labels, position_ids   int64 [T]     labels unshifted, -100 = no loss
        cu_seqlens                        int32 [D+1]   cu_seqlens[-1] == T
        doc_lengths                       int32 [D]     tokens of each segment without its filler
        max_seqlen                        int           longest segment, filler with it
        doc_ids                           int32 [T]     number of the segment; -1 on padding, filler
        pixel_values                      uint8 [P, 3*side*side], see `normalize`, also for what a
                                          stream that normalises gives; side: vision.side
        image_grid_thw                    int64 [N, 3]  in patches, or tiles
        image_doc_ids                     int32 [N]     segment of each image
        num_tiles                         int64 [N]     of tiles only: rows of `pixel_values` of
                                                        each image, its thumbnail the last

    Filler stands behind a document where a plan aligns documents, up to a multiple of
    `plan.align`: pad tokens of the document's segment, without labels.

    `meta` has JSON types: step, micro_step, dp_rank, plan_digest, pack_ids, pack_numbers,
    sample_keys (a list a pack), loss_tokens (planned, of the whole step, all ranks), num_images
    (of this micro-batch), ranks_without_images (of this micro-step), holes, waited_s (seconds that
    the trainer waited for it), step_waited_s (and for the step up to it: of the last micro-batch,
    for the step), and digests (SHA-256 of each pack as received) where the stream was asked for
    them. What may change along the plan:

        pack_length, num_packs   of this micro-batch: T == pack_length * num_packs
        max_pixels               of a picture of this step; max_tiles where pictures are tiles
        next_step                the same three of the step behind this one, num_packs a list by
                                 micro-step; None where this step is the last
    """

    step: int
    micro_step: int
    is_last_micro_step: bool
    meta: dict[str, Any]
    vision: VisionInfo

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in self.values() if isinstance(t, torch.Tensor))


def check_pack(
    arrays: Arrays,
    meta: Mapping[str, Any],
    *,
    pack_length: int,
    vision: VisionInfo,
    align: int = 1,
) -> None:
    """Raise WireError unless the arrays are one whole pack as the session describes packs."""
    pack_id = meta.get("pack_id", "?")

    def refuse(why: str) -> WireError:
        return WireError(f"pack {pack_id}: {why}")

    for name, (dtype, ndim) in PACK_ARRAYS.items():
        array = arrays.get(name)
        if array is None:
            raise refuse(f"array {name} is missing")
        if array.dtype != dtype or array.ndim != ndim:
            raise refuse(f"array {name} is {array.dtype} with {array.ndim} dimensions")
    tokens, grid, bounds = arrays["input_ids"], arrays["image_grid_thw"], arrays["cu_seqlens"]
    if tokens.shape != (pack_length,) or arrays["labels"].shape != (pack_length,):
        raise refuse(f"{tokens.size} tokens, {arrays['labels'].size} labels, not {pack_length}")
    if (
        bounds.size < 2
        or bounds[0] != 0
        or bounds[-1] != pack_length
        or (np.diff(bounds) < 1).any()
    ):
        raise refuse("cu_seqlens does not divide the pack into segments")
    if wrong := _wrong_lengths(arrays, align):
        raise refuse(wrong)
    num_docs = meta.get("num_docs")
    if not isinstance(num_docs, int) or not bounds.size - 2 <= num_docs <= bounds.size - 1:
        raise refuse(f"{num_docs} documents in {bounds.size - 1} segments")
    if grid.shape[1] != 3 or (grid < 1).any() or arrays["image_doc_ids"].shape != grid.shape[:1]:
        raise refuse("image_grid_thw and image_doc_ids do not describe the same images")
    if (
        grid.size
        and not 0 <= arrays["image_doc_ids"].min() <= arrays["image_doc_ids"].max() < num_docs
    ):
        raise refuse("an image belongs to no document")
    needed = (int(vision.num_rows(grid).sum()), 3 * vision.side**2)
    if arrays["pixel_values"].shape != needed:
        shape = arrays["pixel_values"].shape
        raise refuse(f"pixel_values has shape {shape}, the image grids need {needed}")


def _wrong_lengths(arrays: Arrays, align: int) -> str:
    """What is wrong with doc_lengths; empty when nothing is."""
    bounds, lengths = arrays["cu_seqlens"], arrays["doc_lengths"]
    if lengths.shape != (bounds.size - 1,):
        return f"{lengths.size} doc_lengths for {bounds.size - 1} segments"
    filler = np.diff(bounds) - lengths
    if (lengths < 1).any() or (filler < 0).any() or (filler >= align).any():
        return f"doc_lengths do not fill their segments, aligned to {align}"
    if (bounds % align).any():
        return f"cu_seqlens are not multiples of {align}, to which the session aligns documents"
    if filler.any() and (arrays["labels"][_filler(bounds, lengths)] >= 0).any():
        return "filler behind a document has labels"
    return ""


def _filler(bounds: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[T]: the tokens behind a document, in its segment."""
    sizes = np.diff(bounds)
    place = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    filler: NDArray[np.bool_] = place >= np.repeat(lengths, sizes)
    return filler


def _concatenate(packs: Sequence[Arrays], name: str) -> torch.Tensor:
    if len(packs) == 1:
        return torch.from_numpy(packs[0][name])
    return torch.from_numpy(np.concatenate([arrays[name] for arrays in packs]))


def _segments(packs: Sequence[Arrays], num_docs: Sequence[int]) -> dict[str, torch.Tensor]:
    """cu_seqlens of the packs in a row, and what follows from it token by token."""
    lengths = np.concatenate([np.diff(arrays["cu_seqlens"]) for arrays in packs]).astype(np.int64)
    names, first_segment = [], 0
    image_docs = []
    for arrays, docs in zip(packs, num_docs, strict=True):
        segments = arrays["cu_seqlens"].size - 1
        ids = np.arange(first_segment, first_segment + segments, dtype=np.int32)
        ids[docs:] = -1
        names.append(ids)
        image_docs.append(arrays["image_doc_ids"] + np.int32(first_segment))
        first_segment += segments
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    position_ids = np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1], lengths)
    doc_ids = np.repeat(np.concatenate(names), lengths)
    doc_lengths = np.concatenate([arrays["doc_lengths"] for arrays in packs])
    if (doc_lengths != lengths).any():
        doc_ids[position_ids >= np.repeat(doc_lengths, lengths)] = -1
    return {
        "position_ids": torch.from_numpy(position_ids),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "doc_lengths": torch.from_numpy(doc_lengths),
        "doc_ids": torch.from_numpy(doc_ids),
        "image_doc_ids": torch.from_numpy(np.concatenate(image_docs)),
    }


def build_micro_batch(
    packs: Sequence[tuple[Arrays, Mapping[str, Any]]],
    *,
    meta: dict[str, Any],
    is_last_micro_step: bool,
    vision: VisionInfo,
) -> MicroBatch:
    """Packs that passed `check_pack`, in the order of their cell, as one micro-batch on the CPU."""
    arrays = [pack_arrays for pack_arrays, _ in packs]
    batch = MicroBatch()
    batch["input_ids"] = _concatenate(arrays, "input_ids").long()
    batch["labels"] = _concatenate(arrays, "labels").long()
    batch.update(_segments(arrays, [pack_meta["num_docs"] for _, pack_meta in packs]))
    batch["max_seqlen"] = int(batch["cu_seqlens"].diff().max())
    batch["pixel_values"] = _concatenate(arrays, "pixel_values")
    batch["image_grid_thw"] = _concatenate(arrays, "image_grid_thw").long()
    if vision.tile:
        batch["num_tiles"] = torch.from_numpy(
            np.concatenate([vision.num_rows(pack["image_grid_thw"]) for pack in arrays])
        )
    batch.step, batch.micro_step = meta["step"], meta["micro_step"]
    batch.is_last_micro_step = is_last_micro_step
    batch.meta = meta | {
        "sample_keys": [list(pack_meta.get("sample_keys", ())) for _, pack_meta in packs],
        "holes": [hole for _, pack_meta in packs for hole in pack_meta.get("holes", ())],
    }
    batch.vision = vision
    return batch
