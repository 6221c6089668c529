"""The corpus as every loader is given it: the same samples, mixed in the same order.

Invariants: samples that do not fit a pack with their images, and what a `scale` leaves out, are in
nobody's form of it; sources are mixed evenly, each shuffled by a fixed seed, so that a stretch of
the order is like the whole.
"""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.decoders import pillow
from peers.reading import Reader
from peers.work import PACK_LENGTH, Encoder, Entry, Sample, planned_size

SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    name: str
    sources: Sequence[str]
    samples: int
    images: int
    megapixels: float
    stored_bytes: int


def source_names(corpus: Path) -> list[str]:
    names = sorted(p.name for p in corpus.iterdir() if p.is_dir() and any(p.glob("*.jsonl")))
    if not names:
        raise SystemExit(f"{corpus}: no folder with *.jsonl files in it")
    return names


def groups_of(names: Sequence[str]) -> dict[str, list[str]]:
    """The whole corpus, and its photos alone where it has some."""
    return {"all": list(names)} | ({"photos": ["photos"]} if "photos" in names else {})


def write_forms(corpus: Path, folder: Path, scale: float) -> list[Group]:
    """JSONL files of the samples kept and their zips below `folder`, and a mixed list a group."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = source_names(corpus)
    kept = {name: list(_kept(corpus / name, folder / name, scale)) for name in names}
    groups = []
    for group, sources in groups_of(names).items():
        entries = _mixed([kept[source] for source in sources])
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / f"mixed-{group}.jsonl").write_text(text)
        groups.append(_described(group, sources, entries))
    return groups


def _described(name: str, sources: Sequence[str], entries: Sequence[Entry]) -> Group:
    reader = Reader()
    samples = [reader.read(entry) for entry in entries]
    images = [data for sample in samples for data in sample.images]
    pixels = [height * width for height, width, *_ in map(planned_size, images)]
    return Group(
        name=name,
        sources=tuple(sources),
        samples=len(samples),
        images=len(images),
        megapixels=sum(pixels) / 1e6,
        stored_bytes=sum(len(s.record) for s in samples) + sum(map(len, images)),
    )


def _kept(source: Path, target: Path, scale: float) -> Iterator[Entry]:
    target.mkdir()
    encoder = Encoder(pillow)
    draw = random.Random(f"{SEED} {source.name}")
    for records in sorted(source.glob("*.jsonl")):
        archive = records.with_suffix(".zip")
        images = zipfile.ZipFile(archive) if archive.exists() else None
        if images is not None:
            (target / archive.name).symlink_to(archive.resolve())
        offset = 0
        with open(target / records.name, "wb") as out:
            for line in records.read_bytes().splitlines():
                if draw.random() >= scale:
                    continue
                named = json.loads(line).get("image", [])
                members = [named] if isinstance(named, str) else named
                if members:
                    assert images is not None, f"{records}: images, but no {archive.name}"
                    sample = Sample(line, [images.read(member) for member in members])
                    if encoder.length(sample) > PACK_LENGTH:
                        continue
                out.write(line + b"\n")
                yield Entry(
                    str(target / records.name),
                    offset,
                    len(line),
                    str(target / archive.name) if members else "",
                    members,
                )
                offset += len(line) + 1


def _mixed(sources: Sequence[list[Entry]]) -> list[Entry]:
    draw = random.Random(SEED)
    placed = []
    for entries in sources:
        shuffled = draw.sample(entries, len(entries))
        placed += [((i + draw.random()) / len(entries), e) for i, e in enumerate(shuffled)]
    return [entry for _, entry in sorted(placed)]
