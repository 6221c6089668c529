"""How much of a pack samples take where each document begins and ends at a multiple of `align`.

Invariants: integers only; with `align` 1 a token takes one place; a sample of one document is
counted exactly, one of several by the most that its documents can take, however they are cut.

Of k documents of together n tokens each takes at most align - 1 places beside its tokens, and all
of them a multiple of align: at most (n + k * (align - 1)) // align * align, which is what a single
document takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def padded(tokens: Ints, num_docs: Ints, align: int) -> Ints:
    """int64 [N]: places that so many tokens of each sample take, filler with them.

    `num_docs` int64 [N], of the whole sample; some tokens of it are no more documents than tokens.
    """
    docs = np.minimum(num_docs, tokens)
    places: Ints = (tokens + docs * (align - 1)) // align * align
    return places


def room(pack_length: int, num_docs: Ints, align: int) -> Ints:
    """int64 [N]: the most tokens of each sample, in a row, that fit one pack for certain.

    `pack_length` is a multiple of `align`.
    """
    tokens: Ints = np.maximum(pack_length - (num_docs - 1) * (align - 1), pack_length // align)
    return tokens
