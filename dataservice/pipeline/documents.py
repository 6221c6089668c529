"""Lays the rendered records of a pack out as its documents.

Invariants: documents stand in the order of the items and cover their tokens; an item is one
document, or the documents of its record that its piece touches; padding is a segment of its own;
the first token of an item or document, and the labels of items with a hole, carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import PackSpec
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
    """input_ids and labels [T], cu_seqlens, doc_lengths; `masked` are the numbers of the items with a hole."""
    ids = np.full(spec.pack_length, pad_token, np.int32)
    labels = np.full(spec.pack_length, IGNORE, np.int32)
    bounds = [0]
    for number, (item, text) in enumerate(zip(spec.items, rendered, strict=True)):
        piece = slice(item.start, item.stop)
        place = slice(bounds[-1], bounds[-1] + item.stop - item.start)
        ids[place] = text.ids[piece]
        if number not in masked:
            np.copyto(labels[place], text.ids[piece], where=text.loss[piece])
            labels[place.start] = IGNORE
        bounds += [place.start + stop - item.start for _, stop in documents[number]]
    if bounds[-1] < spec.pack_length:
        bounds.append(spec.pack_length)
    cu_seqlens = np.array(bounds, np.int32)
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": cu_seqlens,
        "doc_lengths": np.diff(cu_seqlens),
    }
