"""Writes a synthetic index of any size through the real table writers; there is no data behind it.

    python tests/storage/bigindex.py FOLDER --rows 10000000 --shards 100

Half the shards are text ("text"), half captions with one image each ("caption").
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise

import numpy as np

from dataservice.storage.archives.name_blocks import NameWriter
from dataservice.storage.fingerprints import RecordFileIdentity, source_fingerprint
from dataservice.storage.manifest import (
    ArchiveEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    TableFile,
    make_manifest,
    write_manifest,
)
from dataservice.storage.records import LAYOUTS
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import IMAGES, MEMBERS, SAMPLES, write_table

NUM_MEMBERS = 1000


def write_big_index(path: str | os.PathLike[str], rows: int, shards: int) -> Manifest:
    """An index of `rows` samples in `shards` JSONL files (at least two), readable by Index.open."""
    index_dir = os.fspath(path)
    os.makedirs(index_dir, exist_ok=True)
    ends = np.linspace(0, rows, shards + 1).astype(int).tolist()
    members, names = _write_members(index_dir)
    kinds: dict[str, list[ShardEntry]] = {"text": [], "caption": []}
    archives: list[ArchiveEntry] = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        kind = "text" if number % 2 == 0 else "caption"
        entry = _write_shard(index_dir, kind, number, end - begin, len(archives))
        kinds[kind].append(entry)
        if kind == "caption":
            archives.append(
                ArchiveEntry(
                    kind="zip",
                    url=entry.url.replace(".jsonl", ".zip"),
                    size_bytes=NUM_MEMBERS * 100_000,
                    mtime_ns=1,
                    num_members=NUM_MEMBERS,
                    directory_crc32=number,
                    members=members,
                    names=names,
                )
            )
    sources = tuple(
        SourceEntry(
            name=kind,
            root=f"/nowhere/{kind}",
            fingerprint=_fingerprint(kind, entries),
            shards=tuple(entries),
        )
        for kind, entries in kinds.items()
    )
    manifest = make_manifest(counter="synthetic", archives=tuple(archives), sources=sources)
    write_manifest(index_dir, manifest)
    return manifest


def _fingerprint(kind: str, entries: list[ShardEntry]) -> str:
    files = SourceFiles(name=kind, records=(f"/nowhere/{kind}/*.jsonl",))
    records = [
        RecordFileIdentity(name=entry.name, size_bytes=entry.size_bytes, crc32=entry.crc32)
        for entry in entries
    ]
    return source_fingerprint(files, f"/nowhere/{kind}", records, [])


def _write_members(index_dir: str) -> tuple[TableFile, TableFile]:
    size = np.full(NUM_MEMBERS, 99_000)
    zeros = np.zeros(NUM_MEMBERS, dtype=np.int64)
    columns = {
        "offset": np.arange(NUM_MEMBERS) * 100_000,
        "stored_bytes": size,
        "size_bytes": size,
        "method": zeros,
        "crc32": np.arange(NUM_MEMBERS),
        "mtime_ns": zeros,
        "problem": zeros,
    }
    writer = NameWriter()
    writer.add(f"images/{number:04d}.jpg" for number in range(NUM_MEMBERS))
    name = "archive-synthetic.names.arrow"
    names = TableFile(name=name, size_bytes=writer.write(os.path.join(index_dir, name)))
    return _write(index_dir, "archive-synthetic.members.arrow", MEMBERS, columns), names


def _write_shard(index_dir: str, kind: str, number: int, rows: int, archive: int) -> ShardEntry:
    random = np.random.Generator(np.random.Philox(key=number))
    tokens = np.exp(random.normal(6.0, 1.2, rows)).clip(8, 60_000).astype(np.uint32)
    length = tokens * 4 + 80
    offset = np.concatenate([[0], np.cumsum(length + 1, dtype=np.uint64)])[:rows]
    num_images = rows if kind == "caption" else 0
    samples = {
        "offset": offset.astype(np.uint64),
        "length": length.astype(np.uint32),
        "crc32": random.integers(0, 1 << 32, rows, dtype=np.uint32),
        "text_tokens": tokens,
        "loss_tokens": tokens // 2 + 1,
        "image_start": np.arange(rows, dtype=np.uint32) if num_images else _zeros(rows),
        "num_images": np.full(rows, num_images and 1, dtype=np.uint16),
        "layout": np.full(rows, LAYOUTS.index("llava"), dtype=np.uint8),
        "num_docs": np.ones(rows, dtype=np.uint8),
        "by_kind": np.arange(rows, dtype=np.uint32),
    }
    sides = np.exp(random.normal(6.2, 0.5, (2, num_images))).clip(40, 4000).astype(np.uint32)
    images = {
        "archive": _zeros(num_images),
        "member": random.integers(0, NUM_MEMBERS, num_images, dtype=np.uint32),
        "width": sides[0],
        "height": sides[1],
        "text_before": _zeros(num_images),
        "markup": np.full(num_images, 2, dtype=np.uint8),
        "probed": _zeros(num_images),
    }
    name = f"{kind}-{number:05d}.jsonl"
    return ShardEntry(
        name=name,
        url=f"/nowhere/{kind}/{name}",
        size_bytes=int(length.sum(dtype=np.int64)) + rows,
        mtime_ns=1,
        packing="",
        unpacked_bytes=0,
        crc32=number,
        num_samples=rows,
        num_text_samples=rows - num_images,
        num_rejected=0,
        num_images=num_images,
        text_tokens=int(tokens.sum(dtype=np.int64)),
        loss_tokens=int((tokens // 2 + 1).sum(dtype=np.int64)),
        digest=f"{kind}-{number}",
        samples=_write(index_dir, f"shard-{number:05d}.samples.arrow", SAMPLES, samples),
        images=_write(index_dir, f"shard-{number:05d}.images.arrow", IMAGES, images),
        archives=(archive,) if num_images else (),
    )


def _write(
    index_dir: str, name: str, names: tuple[str, ...], columns: dict[str, np.ndarray]
) -> TableFile:
    written = write_table(f"{index_dir}/{name}", names, columns)
    return TableFile(name=name, size_bytes=written.size_bytes)


def _zeros(rows: int) -> np.ndarray:
    return np.zeros(rows, dtype=np.uint32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--shards", type=int, default=100)
    given = parser.parse_args()
    write_big_index(given.folder, given.rows, given.shards)
