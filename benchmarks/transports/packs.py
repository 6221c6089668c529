"""The pack that is carried: pixels that nothing makes smaller, and tokens as they are spread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS_A_PACK = 8192
VOCABULARY = 150_000
FRAME_BYTES = 512 << 10
"""Of the ways that cut a block into messages, ours among them."""


def tokens(random: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Ids of a vocabulary, the frequent ones small, as byte pair encodings have them."""
    return (random.zipf(1.2, count) % VOCABULARY).astype(np.int32)


def pack_arrays(size_bytes: int) -> dict[str, NDArray[Any]]:
    """Arrays of `size_bytes` together, up to a row of pixels."""
    random = np.random.default_rng(7)
    ids = tokens(random, TOKENS_A_PACK)
    labels = ids.copy()
    labels[::3] = -100
    rest = size_bytes - ids.nbytes - labels.nbytes
    pixels = random.integers(0, 256, (rest // 768, 768), np.uint8)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}


def raw_block(size_bytes: int) -> bytes:
    return np.random.default_rng(7).bytes(size_bytes)
