"""The pictures and packs that the decode benchmark measures: of a corpus, or made for it.

A corpus is a folder with a folder for each source: NAME.jsonl files, and NAME.zip files where it
has pictures. Without one a small corpus of noisy synthetic pictures is made: good to see that all
runs, no measure of real photos.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from dataservice.cli.index_view import open_index
from dataservice.config import Config, load_config
from dataservice.core.packspec import ImageSpec, PackSpec
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.storage.members import read_image
from dataservice.storage.objects import ShardReader

GRID = Grid(dp_size=1, micro_steps=4)
MADE = {
    "photos": (("JPEG", 0.3), ("JPEG", 1.0), ("JPEG", 4.0), ("JPEG", 12.0), ("WEBP", 1.0)),
    "pages": (("PNG", 0.05), ("PNG", 0.4), ("JPEG", 0.1)),
}
"""(format, megapixels) of the pictures of a made source, over and over."""
MADE_PICTURES = {"photos": 30, "pages": 60}


def source_names(corpus: Path) -> list[str]:
    names = sorted(p.name for p in corpus.iterdir() if p.is_dir() and any(p.glob("*.jsonl")))
    if not names:
        raise SystemExit(f"{corpus}: no folder with *.jsonl files in it")
    return names


def with_pictures(corpus: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if any((corpus / name).glob("*.zip"))]


def make_config(
    corpus: Path, names: Sequence[str], folder: Path, *, threads: int, exact: bool = False
) -> Config:
    """Of a job over these sources, its index and state in `folder`."""
    sources = []
    for name in names:
        source: dict[str, Any] = {"name": name, "records": str(corpus / name / "*.jsonl")}
        if with_pictures(corpus, [name]):
            source["images"] = str(corpus / name / "*.zip")
        sources.append(source)
    settings = {
        "job": "benchmark",
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": sources,
        "vision": {"exact": exact},
        "plan": {"epochs": 1, "remainder": "drop"},
        "workers": {"decode_threads": threads, "decode_deadline_s": 120.0},
        "serving": {"port": 0, "plan_ahead_steps": 64},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return load_config(folder / "config.yaml")


def planned_packs(config: Config, most: int) -> list[PackSpec]:
    """The first packs of the plan, whole steps of GRID."""
    index = open_index(config)
    plan = Plan(config.plan, index)
    specs: list[PackSpec] = []
    step = plan.step(plan.start(), GRID)
    while step is not None and len(specs) + GRID.num_packs <= most:
        specs += [
            index.pack_spec(plan.window(lane, window), number, rules=config.plan.vision)
            for lane, window, number in zip(
                step.lane.tolist(), step.window.tolist(), step.number.tolist(), strict=True
            )
        ]
        step = plan.step(step.next_cursor, GRID)
    if not specs:
        raise SystemExit(f"the sources do not fill one step of {GRID.num_packs} packs")
    return specs


def pictures_of(specs: Sequence[PackSpec]) -> list[ImageSpec]:
    return [image for spec in specs for item in spec.items for image in item.kept]


def read_pictures(specs: Sequence[PackSpec]) -> Iterator[tuple[ImageSpec, bytes]]:
    """Each picture once, with its file's bytes."""
    seen: set[tuple[str, str]] = set()
    with ShardReader(None) as reader:
        for spec in specs:
            for image in pictures_of([spec]):
                shard = spec.shards[image.shard]
                if (shard.url, image.member) not in seen:
                    seen.add((shard.url, image.member))
                    yield image, read_image(reader.read, image, shard)


# ---- a made corpus -------------------------------------------------------------------------------


def make_corpus(folder: Path) -> Path:
    rng = np.random.Generator(np.random.Philox(5))
    for name, kinds in MADE.items():
        (folder / name).mkdir(parents=True)
        lines = []
        with zipfile.ZipFile(folder / name / f"{name}.zip", "w") as archive:
            for number in range(MADE_PICTURES[name]):
                codec, megapixels = kinds[number % len(kinds)]
                member = f"{number:04d}.{codec.lower()}"
                archive.writestr(member, _picture(rng, codec, megapixels))
                turns = [
                    {"from": "human", "value": "<image>\n" + _words(rng, 40)},
                    {"from": "gpt", "value": _words(rng, 150)},
                ]
                lines.append(json.dumps({"image": member, "conversations": turns}))
        (folder / name / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "text").mkdir()
    texts = [json.dumps({"text": _words(rng, int(n))}) for n in rng.integers(50, 1500, 200)]
    (folder / "text" / "text.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def _picture(rng: np.random.Generator, codec: str, megapixels: float) -> bytes:
    """Soft shapes with noise, as compressible as a photo."""
    height = int((megapixels * 1e6 * 3 / 4) ** 0.5)
    width = int(megapixels * 1e6 / height)
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8)
    shapes = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.normal(0, 4, (height, width, 1))
    pixels = np.clip(np.asarray(shapes) + noise, 0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, codec, quality=88)
    return stored.getvalue()


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join("abcdefgh"[: int(n)] for n in rng.integers(1, 9, count))
