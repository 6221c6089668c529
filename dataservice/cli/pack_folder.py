"""A folder of built packs for a person: a page a pack, a page of all, JSON, and arrays if wanted.

Invariants: arrays are written without pickle; a pack is held while it is written and no longer;
the pages and the JSON say the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from dataservice.actors.offline import PlacedPack
from dataservice.cli.pack_page import index_page, pack_page, strip
from dataservice.config.folders import check_writable
from dataservice.core.vision import VisionRules
from dataservice.pipeline.documents import IGNORE
from dataservice.pipeline.text import TextRenderer
from dataservice.wire.codec import pack_digest


def described(step: int, pack: PlacedPack) -> dict[str, Any]:
    """What a table and --json say of a pack."""
    arrays, meta = pack.built.arrays, pack.built.meta
    return {
        "step": step,
        "micro_step": pack.micro_step,
        "dp_rank": pack.dp_rank,
        "place": pack.place,
        "pack_id": pack.spec.pack_id,
        "number": pack.number,
        "digest": pack_digest(arrays),
        "tokens": pack.spec.num_tokens,
        "loss_tokens": int((arrays["labels"] != IGNORE).sum()),
        "num_images": len(arrays["image_grid_thw"]),
        "cost": pack.cost,
        "sample_keys": list(meta["sample_keys"]),
        "holes": list(meta["holes"]),
    }


class PackFolder:
    """Add the packs, then `finish`."""

    def __init__(
        self, path: str, renderer: TextRenderer, rules: VisionRules, *, with_arrays: bool
    ) -> None:
        """ConfigError for a folder that cannot be written to."""
        check_writable("--out", path)
        self._path = path
        self._renderer = renderer
        self._rules = rules
        self._with_arrays = with_arrays
        self._rows: list[dict[str, Any]] = []
        self._strips: list[str] = []

    def add(self, row: dict[str, Any], pack: PlacedPack, *, name: str) -> None:
        """Writes a pack, and the name of its files, without .html or .npz, into `row`."""
        row["file"] = name
        if self._with_arrays:
            with open(os.path.join(self._path, f"{name}.npz"), "wb") as file:
                np.savez_compressed(file, allow_pickle=False, **pack.built.arrays)
        self._rows.append(row)
        self._strips.append(strip(pack, self._renderer))
        self._write(f"{name}.html", pack_page(row, pack, self._renderer, self._rules))

    def finish(
        self, name: str, about: Mapping[str, Any], *, title: str, facts: Mapping[str, str]
    ) -> str:
        """Writes `about` and the packs as JSON to `name`, and index.html, whose path it returns."""
        with open(os.path.join(self._path, name), "wb") as file:
            told = {**about, "packs": self._rows}
            file.write(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        return self._write("index.html", index_page(title, facts, self._rows, self._strips))

    def _write(self, name: str, text: str) -> str:
        path = os.path.join(os.path.abspath(self._path), name)
        with open(path, "w", encoding="utf-8") as page:
            page.write(text)
        return path
