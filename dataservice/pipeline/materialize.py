"""Builds the arrays of one pack from its spec: reads, decodes, renders, masks.

Invariants: the bytes are a function of the spec, the shards' content, the settings and the holes
alone, whatever thread comes first; the layout never depends on whether a picture could be had; a
hole is zeros in the picture's patches and -100 in all labels of its sample, or, where fallbacks are
wanted, FALLBACK in its patches and the labels as they are; a record that cannot be had is padding,
one document, all its labels -100, in either case; a record that is a list of records is as many
documents, side by side; of a sample that is cut off, images beyond the cut are not
read and no image is cut; nothing writes into the arrays after `build_pack` returned. Pictures are
read and decoded largest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import PackSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.documents import (
    document_keys,
    documents_of,
    image_doc_ids,
    text_arrays,
)
from dataservice.pipeline.images import DecodeLimits, Decoder
from dataservice.pipeline.pictures import PackPictures, Picture, pictures_of
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.reading import Reader, record_key
from dataservice.pipeline.specs import check_spec, grid
from dataservice.pipeline.text import TextRenderer
from dataservice.pipeline.texts import PackTexts
from dataservice.storage.sources import RecordFormat

FALLBACK = 127
"""Every value of a picture that stands in for one that cannot be had: a gray one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPack:
    """T = pack length, D = documents, N = images, P = patches, F = 3 * patch * patch; of tiles P is
    the number of tiles, those of thumbnails with it, and F = 3 * tile * tile.

    arrays: input_ids int32 [T]; labels int32 [T], unshifted, -100 where there is no loss;
    cu_seqlens int32 [D + 1], padding is its own last segment; doc_lengths int32 [D], the tokens of
    each segment without the filler behind an aligned document; pixel_values uint8 [P, F];
    image_grid_thw int32 [N, 3] in patches or tiles; image_doc_ids int32 [N].
    """

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]
    """pack_id, sample_keys (one a document: ItemSpec.piece_key, or in the same form the part of the
    sample that the document is), num_docs (padding not counted), holes ("<hole key>: <reason>", of
    a picture with its place behind; "<hole key>: fallback: ..." where a gray one stands in)."""
    new_holes: dict[str, str]
    """Hole key to reason, of the holes that were not known before."""


def build_pack(
    spec: PackSpec,
    *,
    reader: Reader,
    renderer: TextRenderer,
    formats: Mapping[str, RecordFormat],
    rules: VisionRules,
    holes: Mapping[str, str],
    storage_holes: bool,
    decoder: Decoder,
    limits: DecodeLimits,
    pool: BuildPools,
    need: tuple[int, ...] = (),
    bad_image: Literal["hole", "fallback"] = "hole",
) -> BuiltPack:
    """Builds the pack; safe to call from several threads with one pool.

    `need` is the pack's place in the order of need: of packs that are built at once, the tasks of
    the one with the lowest come first.
    `formats` are those of the records, by source; the layout is the one that the index recognised.
    `holes` are the known ones: they are not read. A damaged picture or record, or a picture that
    takes too long to decode, becomes a new hole; one whose read fails only with `storage_holes`.
    `bad_image`: what is put in a picture's place then.

    Raises StaleIndexError when a shard or a setting is not what the index saw, StorageError
    (StorageTimeout) when a read fails in a way that may pass, ValueError for a spec that
    contradicts itself.
    """
    check_spec(spec, rules)
    pictures = pictures_of(spec, rules)
    pixels = np.zeros(rules.pixel_shape(spec.num_patches), np.uint8)
    images = PackPictures(spec, reader, formats, decoder, limits, pool, need)
    texts = PackTexts(
        spec, reader, renderer, formats, rules, pool.texts, limits.read_deadline_s, need
    )
    try:
        images.start([p for p in pictures if p.key not in holes], pixels)
        texts.start(holes)
        rendered, new_holes = texts.finish(storage_holes)
        new_holes |= images.finish(storage_holes)
    finally:
        images.cancel()
        texts.cancel()
    all_holes = {**holes, **new_holes}
    lost = [p for p in pictures if p.key in all_holes]
    for picture in lost:  # a sample may stand in a pack twice, and fail once
        pixels[picture.patches] = FALLBACK if bad_image == "fallback" else 0
    blank = [i for i, item in enumerate(spec.items) if record_key(item.key) in all_holes]
    for i in blank:
        rendered[i] = texts.blank(spec.items[i])
    masked = set(blank)
    if bad_image == "hole":
        masked |= {p.item for p in lost}
    documents = documents_of(spec, rendered)
    arrays = text_arrays(spec, rendered, documents, renderer.pad_token, masked)
    arrays["pixel_values"] = pixels
    arrays["image_grid_thw"] = np.array(
        [[1, *grid(p.spec, rules)] for p in pictures], np.int32
    ).reshape(-1, 3)
    arrays["image_doc_ids"] = image_doc_ids(spec, rendered, documents)
    meta = {
        "pack_id": spec.pack_id,
        "sample_keys": document_keys(spec, documents),
        "num_docs": sum(map(len, documents)),
        "holes": _told(spec, blank, lost, all_holes, "" if bad_image == "hole" else "fallback: "),
    }
    return BuiltPack(arrays=arrays, meta=meta, new_holes=new_holes)


def _told(
    spec: PackSpec,
    blank: Sequence[int],
    lost: Sequence[Picture],
    reasons: Mapping[str, str],
    word: str,
) -> list[str]:
    """Each hole once; `blank` are the items without a record, `word` says what pictures are now."""
    records = dict.fromkeys(record_key(spec.items[i].key) for i in blank)
    pictures = {p.key: p.place for p in lost}
    return [f"{key}: {reasons[key]}" for key in records] + [
        f"{key}: {word}{reasons[key]} ({place})" for key, place in pictures.items()
    ]
