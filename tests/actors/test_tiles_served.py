"""Tiles through the whole service, without Ray: what a rank is told of them, and gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService

from trainer_client import cost_terms, normalize

TILES = {"mode": "tiles", "tile": 56, "max_tiles": 6, "tile_tokens": 4}


def test_a_rank_reads_tiles(tmp_path: Path) -> None:
    config = demo_config(tmp_path, vision=TILES)
    seen = {"tiles": 0, "thumbnails": 0}

    def look(batch: Any) -> None:
        vision, tiles = batch.vision, batch["num_tiles"]
        assert (vision.tile, vision.thumbnail, vision.tile_tokens) == (56, True, 4)
        assert normalize(batch).shape == (int(tiles.sum()), 3, 56, 56)
        rows = batch["image_grid_thw"].prod(dim=1)
        assert (tiles == rows + (rows > 1)).all()
        assert int((batch["input_ids"] == 261).sum()) == 4 * int(tiles.sum())
        assert cost_terms(batch)["patches"] == 16 * int(tiles.sum())
        seen["tiles"] += int(tiles.sum())
        seen["thumbnails"] += int((tiles > 1).sum())

    with LocalService(config) as service:
        read_ranks(service.endpoint, job="test", dp_size=1, micro_steps=4, steps=4, on_batch=look)
    assert seen["tiles"] > seen["thumbnails"] > 0
