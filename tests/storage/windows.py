"""Windows as a plan would make them, of chosen samples."""

from __future__ import annotations

import numpy as np

from dataservice.core.tables import REASONS, WindowPlan


def window_of(
    items: list[tuple[int, int, int]], packs: list[int], *, image_limit: list[int] | None = None
) -> WindowPlan:
    """A window of samples (source, row, kept images), cut into packs at `packs`."""
    source, row, kept_images = np.array(items, dtype=np.int64).reshape(-1, 3).T
    zeros = np.zeros(len(items), dtype=np.int64)
    by_pack = np.arange(len(packs) - 1, dtype=np.int64)
    return WindowPlan(
        lane=2,
        window=5,
        pack_length=512,
        item_offsets=np.array(packs, dtype=np.int64),
        source=source,
        row=row,
        start=zeros,
        stop=zeros + 9,
        total_tokens=zeros + 9,
        kept_images=kept_images,
        image_limit=zeros + 1600 if image_limit is None else np.array(image_limit, dtype=np.int64),
        tokens=by_pack + 100,
        image_tokens=by_pack,
        num_images=by_pack,
        num_patches=by_pack + 50,
        loss_tokens=by_pack,
        cost=by_pack,
        counts=np.zeros((len(REASONS), 2), dtype=np.int64),
    )
