"""Lays the rendered records of a pack out as its documents.

Invariants: documents stand in the order of the items and cover their tokens; an item is one
document, or the documents of its record that its piece touches; documents begin at multiples of the
pack's `align`, with filler behind them where they end elsewhere; padding is a segment of its own;
the first token of an item or document, and the labels of items with a hole, carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import PackSpec
from dataservice.pipeline.specs import aligned
from dataservice.pipeline.text import Rendered

IGNORE = -100
"""The label of a token without loss."""

Documents = list[list[tuple[int, int]]]
"""By item: first token and end of each of its documents, in tokens of the sample."""


def documents_of(spec: PackSpec, rendered: Sequence[Rendered]) -> Documents:
    documents = []
    for item, text in zip(spec.items, rendered, strict=True):
        inside = [start for start in text.starts if item.start < start < item.stop]
        documents.append(list(pairwise([item.start, *inside, item.stop])))
    return documents


def document_keys(spec: PackSpec, documents: Documents) -> list[str]:
    """By document: the key of its item's piece, or of the part of it that the document is."""
    keys = []
    for item, parts in zip(spec.items, documents, strict=True):
        if len(parts) == 1:
            keys.append(item.piece_key)
            continue
        keys += [replace(item, start=start, stop=stop).piece_key for start, stop in parts]
    return keys


def image_doc_ids(
    spec: PackSpec, rendered: Sequence[Rendered], documents: Documents
) -> NDArray[np.int32]:
    """[N] of the kept images; they are all in pieces that begin their sample."""
    numbers: list[int] = []
    first = 0
    for item, text, parts in zip(spec.items, rendered, documents, strict=True):
        numbers += [first + number for number in text.image_docs[: item.kept_images]]
        first += len(parts)
    return np.array(numbers, np.int32)


def text_arrays(
    spec: PackSpec,
    rendered: Sequence[Rendered],
    documents: Documents,
    pad_token: int,
    masked: set[int],
) -> dict[str, NDArray[Any]]:
    """input_ids and labels [T], cu_seqlens, doc_lengths; `masked` are the numbers of the items with
    a hole."""
    lengths = [stop - start for parts in documents for start, stop in parts]
    bounds = [0, *accumulate(aligned(length, spec.align) for length in lengths)]
    if bounds[-1] > spec.pack_length:
        raise ValueError(
            f"spec of pack {spec.pack_id}: its documents, aligned to {spec.align}, take "
            f"{bounds[-1]} places of {spec.pack_length}"
        )
    ids = np.full(spec.pack_length, pad_token, np.int32)
    labels = np.full(spec.pack_length, IGNORE, np.int32)
    places = iter(bounds)
    for number, (item, text) in enumerate(zip(spec.items, rendered, strict=True)):
        for start, stop in documents[number]:
            first = next(places)
            place = slice(first, first + stop - start)
            ids[place] = text.ids[start:stop]
            if number not in masked:
                np.copyto(labels[place], text.ids[start:stop], where=text.loss[start:stop])
                if start == item.start:
                    labels[first] = IGNORE
    if bounds[-1] < spec.pack_length:
        lengths.append(spec.pack_length - bounds[-1])
        bounds.append(spec.pack_length)
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": np.array(bounds, np.int32),
        "doc_lengths": np.array(lengths, np.int32),
    }
