"""The demo's pictures as tiles: indexed, planned, built and turned into a trainer's batch, against
InternVL's preprocessing done plainly with Pillow."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.internvl import tiles_of
from support.reference import over_white

from dataservice.core.plan import Plan
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import SourceFiles
from trainer_client import cost_terms, normalize
from trainer_client.batch import VisionInfo, build_micro_batch, check_pack

DATA = Path(__file__).parents[1] / "data"
NAMES = ("caption", "multi")
RULES = VisionRules(mode="tiles", tile=56, max_tiles=6, tile_tokens=4, exact=True)
VISION = VisionInfo(
    patch=14,
    merge=2,
    temporal_patch=2,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    tile=56,
    thumbnail=True,
    tile_tokens=4,
)
HOLE = "images/cell-081.jpg"
IMAGE = 261


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("index"))
    build_index(sources(), folder, counter=lambda: TextRenderer.build(TextSettings()))
    return folder


def sources() -> list[SourceFiles]:
    return [SourceFiles(name=n, records=(str(DATA / n / "*.jsonl"),)) for n in NAMES]


def build(index_dir: str, pack_length: int, rules: VisionRules = RULES) -> Iterator[BuiltPack]:
    """Every pack of one epoch, with what its window says of it checked."""
    index, renderer = Index.open(index_dir), TextRenderer.build(TextSettings())
    settings = PlanSettings(
        sources=tuple(SourceShare(name=n) for n in NAMES), pack_length=pack_length, vision=rules
    )
    plan = Plan(settings, index)
    with (
        ShardReader(None, deadline_s=30, retries=0) as reader,
        BuildPools(decode_threads=2) as pools,
    ):
        numbers = [(n, w) for n in range(plan.num_lanes) for w in range(plan.windows_in(n))]
        for lane, number in numbers:
            window = plan.window(lane, number)
            for k in range(window.num_packs):
                built = build_pack(
                    index.pack_spec(window, k, rules=rules),
                    reader=reader,
                    renderer=renderer,
                    formats={source.name: source.format for source in sources()},
                    rules=rules,
                    holes={},
                    storage_holes=False,
                    decoder=ImageDecoder(rules, DecodeLimits()),
                    limits=DecodeLimits(),
                    pool=pools,
                )
                check_pack(built.arrays, built.meta, pack_length=pack_length, vision=VISION)
                assert window.num_patches[k] == 16 * len(built.arrays["pixel_values"])
                assert window.image_tokens[k] == (built.arrays["input_ids"] == IMAGE).sum()
                terms = cost_terms(batch_of(built))
                cost = settings.p_ref * terms["patches"] + terms["patches_squared"]
                assert window.cost[k] == cost
                yield built


def batch_of(built: BuiltPack) -> Any:
    return build_micro_batch(
        [(built.arrays, built.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VISION,
    )


def image_names() -> dict[str, list[str]]:
    """By sample key; read with json alone."""
    found = {}
    for path in sorted(DATA.glob("*/*.jsonl")):
        offset = 0
        for line in path.read_bytes().splitlines(keepends=True):
            names = json.loads(line).get("image", [])
            key = f"{path.parent.name}/{path.name}@{offset}"
            found[key] = [names] if isinstance(names, str) else names
            offset += len(line)
    return found


def expected_tiles(key: str, name: str, most: int = 6) -> np.ndarray:
    image = picture_of(next(DATA.glob(f"*/{Path(key.split('@')[0]).stem}.zip")), name)
    return tiles_of(image, min_num=1, max_num=most, image_size=56, thumbnail=True)


@functools.cache
def picture_of(path: Path, name: str) -> Image.Image:
    with zipfile.ZipFile(path) as archive:
        return over_white(ImageOps.exif_transpose(Image.open(io.BytesIO(archive.read(name)))))


def test_every_picture_is_its_tiles(index_dir: str) -> None:
    names, compared, thumbnails = image_names(), 0, 0
    for built in build(index_dir, 4096):
        batch = batch_of(built)
        starts = [0, *np.cumsum(batch["num_tiles"].numpy())]
        wanted = [(key, name) for key in built.meta["sample_keys"] for name in names[key]]
        assert len(wanted) == len(batch["num_tiles"])
        for i, (key, name) in enumerate(wanted):
            tiles = built.arrays["pixel_values"][starts[i] : starts[i + 1]]
            if name == HOLE:
                assert not tiles.any()
                continue
            expected = expected_tiles(key, name)
            assert np.array_equal(tiles.reshape(expected.shape), expected), name
            rows_columns = batch["image_grid_thw"][i].tolist()
            assert rows_columns[0] == 1
            assert len(tiles) in (1, rows_columns[1] * rows_columns[2] + 1)
            compared += 1
            thumbnails += len(tiles) > 1
        for document in range(built.meta["num_docs"]):
            own = batch["image_doc_ids"] == document
            tokens = batch["input_ids"][batch["doc_ids"] == document] == IMAGE
            assert tokens.sum() == 4 * batch["num_tiles"][own].sum()
    assert compared > 300
    assert thumbnails > 100


def test_a_trainer_reads_tiles_as_internvl_does(index_dir: str) -> None:
    batch = batch_of(next(build(index_dir, 4096)))
    values = normalize(batch)
    assert values.shape == (int(batch["num_tiles"].sum()), 3, 56, 56)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (VISION.mean, VISION.std))
    plain = (batch["pixel_values"].view(values.shape) / 255 - mean) / std
    torch.testing.assert_close(values, plain, atol=1e-5, rtol=0)


def test_samples_that_are_too_long_have_fewer_tiles(index_dir: str) -> None:
    """There is no room for 7 tiles of 60 tokens of each picture where a sample has several."""
    rules = dataclasses.replace(RULES, tile_tokens=60)
    names, fewer = image_names(), 0
    for built in build(index_dir, 640, rules):
        batch = batch_of(built)
        starts = [0, *np.cumsum(batch["num_tiles"].numpy())]
        wanted = [(key, name) for key in built.meta["sample_keys"] for name in names[key]]
        for i, (key, name) in enumerate(wanted):
            if name == HOLE:
                continue
            tiles = built.arrays["pixel_values"][starts[i] : starts[i + 1]]
            whole = len(expected_tiles(key, name))
            assert len(tiles) <= whole
            if len(tiles) < whole:
                rows, columns = batch["image_grid_thw"][i, 1:].tolist()
                assert any(
                    np.array_equal(tiles.reshape(-1, 3, 56, 56), expected_tiles(key, name, most))
                    for most in range(rows * columns, 6)
                )
                fewer += 1
    assert fewer > 10
