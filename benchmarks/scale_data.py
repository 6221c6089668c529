"""A planted index for benchmarks/scale.py: tables of samples and pictures that no file holds.

Invariants: the tables are those of a real index, so that planning and specs cost what they cost
with data; a sample is a chat with one picture on average, some 500 tokens of 8,192; seeded.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from dataservice.config import Config, load_config
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.archives.name_blocks import NameWriter
from dataservice.storage.manifest import (
    ArchiveEntry,
    ShardEntry,
    SourceEntry,
    TableFile,
    make_manifest,
    write_manifest,
)
from dataservice.storage.records import LAYOUTS
from dataservice.storage.tables import IMAGES, MEMBERS, SAMPLES, write_table

Ints = NDArray[np.int64]

SHARDS = 16
SAMPLES_A_SHARD = 50_000
PACK_LENGTH = 8192
LANES = 32
WINDOW = 4096
RECORD_BYTES = 800
MEMBER_BYTES = 120_000


def planted_config(folder: Path, *, workers: int, lease_s: float) -> Config:
    """A config over an index that is written into `folder`."""
    settings = {
        "job": "scale",
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": [{"name": "chat", "records": str(folder / "*.jsonl"), "weight": 1}],
        "vision": {"patch": 16, "merge": 2, "max_pixels": 1 << 20},
        "plan": {
            "pack_length": PACK_LENGTH,
            "lanes": LANES,
            "window": WINDOW,
            "epochs": "endless",
        },
        "workers": {"count": workers, "max": workers},
        "serving": {"port": 0, "lease_s": lease_s},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path)
    _plant(Path(config.index_dir), TextRenderer.build(config.text).fingerprint)
    return config


def _plant(index_dir: Path, counter: str) -> None:
    index_dir.mkdir(parents=True)
    rng = np.random.default_rng(0)
    planted = [_shard(index_dir, number, rng) for number in range(SHARDS)]
    shards = tuple(replace(shard, archives=(number,)) for number, (shard, _) in enumerate(planted))
    source = SourceEntry(name="chat", root="/planted", fingerprint="planted", shards=shards)
    archives = tuple(archive for _, archive in planted)
    write_manifest(
        str(index_dir), make_manifest(counter=counter, archives=archives, sources=(source,))
    )


def _shard(
    index_dir: Path, number: int, rng: np.random.Generator
) -> tuple[ShardEntry, ArchiveEntry]:
    rows = SAMPLES_A_SHARD
    num_images = rng.choice([0, 1, 1, 1, 2], rows)
    text = rng.lognormal(5.3, 0.7, rows).astype(np.int64).clip(8, 4000)
    total = int(num_images.sum())
    by_kind = np.concatenate([np.flatnonzero(num_images == 0), np.flatnonzero(num_images)])
    samples = {
        "offset": np.arange(rows) * RECORD_BYTES + rng.integers(0, 50, rows),
        "length": np.full(rows, RECORD_BYTES - 60) + rng.integers(0, 50, rows),
        "crc32": rng.integers(0, 1 << 32, rows),
        "text_tokens": text,
        "loss_tokens": text * 3 // 4,
        "image_start": np.cumsum(num_images) - num_images,
        "num_images": num_images,
        "layout": np.full(rows, LAYOUTS.index("llava")),
        "num_docs": np.ones(rows, dtype=np.int64),
        "by_kind": by_kind,
    }
    images = {
        "archive": np.zeros(total, dtype=np.int64),
        "member": rng.permutation(total),
        "width": rng.integers(200, 900, total),
        "height": rng.integers(200, 700, total),
        "text_before": np.full(total, 5),
        "markup": np.full(total, 2),
        "probed": np.ones(total, dtype=np.int64),
    }
    tables = {
        what: _table(index_dir, f"shard-{number}.{what}.arrow", columns, values)
        for what, columns, values in (("samples", SAMPLES, samples), ("images", IMAGES, images))
    }
    entry = ShardEntry(
        name=f"part-{number:05d}.jsonl",
        url=f"/planted/part-{number:05d}.jsonl",
        size_bytes=rows * RECORD_BYTES,
        mtime_ns=1,
        packing="",
        unpacked_bytes=0,
        crc32=number,
        num_samples=rows,
        num_text_samples=int((num_images == 0).sum()),
        num_rejected=0,
        num_images=total,
        text_tokens=int(text.sum()),
        loss_tokens=int(samples["loss_tokens"].sum()),
        digest=hashlib.sha256(str(number).encode()).hexdigest(),
        samples=tables["samples"],
        images=tables["images"],
        archives=(),
    )
    return entry, _archive(index_dir, number, total, rng)


def _archive(index_dir: Path, number: int, members: int, rng: np.random.Generator) -> ArchiveEntry:
    stored = rng.integers(MEMBER_BYTES // 2, MEMBER_BYTES * 3 // 2, members)
    values = {
        "offset": np.cumsum(stored) - stored,
        "stored_bytes": stored,
        "size_bytes": stored,
        "method": np.zeros(members, dtype=np.int64),
        "crc32": rng.integers(0, 1 << 32, members),
        "mtime_ns": np.zeros(members, dtype=np.int64),
        "problem": np.zeros(members, dtype=np.int64),
    }
    writer = NameWriter()
    writer.add(f"{number:03d}/{member * 7919 % 10**9:09d}.jpg" for member in range(members))
    name = f"archive-{number}.names.arrow"
    return ArchiveEntry(
        kind="zip",
        url=f"/planted/part-{number:05d}.zip",
        size_bytes=int(stored.sum()),
        mtime_ns=1,
        num_members=members,
        directory_crc32=number,
        members=_table(index_dir, f"archive-{number}.members.arrow", MEMBERS, values),
        names=TableFile(name=name, size_bytes=writer.write(str(index_dir / name))),
    )


def _table(
    index_dir: Path, name: str, columns: tuple[str, ...], values: dict[str, Ints]
) -> TableFile:
    written = write_table(str(index_dir / name), columns, values)
    return TableFile(name=name, size_bytes=written.size_bytes)
