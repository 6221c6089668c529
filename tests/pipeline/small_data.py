"""A JSONL file and a zip of small pictures on disk, and pack specs that point into them."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.core.vision import VisionRules, target_size
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.records import parse_record
from dataservice.storage.sources import RecordFormat

RULES = VisionRules(patch=4, merge=2, min_pixels=64, max_pixels=1600, exact=True)
FORMATS = {"src": RecordFormat()}
SIZES = {"small.png": (24, 16), "large.jpg": (90, 61), "tall.jpg": (20, 70), "bad.jpg": (64, 64)}


class Data:
    """One JSONL file and one zip on disk, and specs that point into them."""

    def __init__(self, folder: Path, records: list[dict[str, object]] | None = None) -> None:
        self.pictures = dict(self._pictures())
        self.records = records or [
            {"text": "A first text, äöü."},
            talk("Look: <image> and <image>!", "Two.", ["large.jpg", "small.png"]),
            {"text": "A much longer text. " * 20},
            talk("<image>", "Tall.", "tall.jpg"),
            talk("<image>", "Bad.", ["bad.jpg"]),
            talk("Before <image> after <image>", "One is bad.", ["bad.jpg", "tall.jpg"]),
        ]
        zip_path, self.jsonl = folder / "a.zip", folder / "a.jsonl"
        with zipfile.ZipFile(zip_path, "w") as archive:
            for number, (name, data) in enumerate(self.pictures.items()):
                method = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
                archive.writestr(name, data, compress_type=method)
        with zipfile.ZipFile(zip_path) as archive:
            self.members = {info.filename: info for info in archive.infolist()}
        self.lines = [json.dumps(r, ensure_ascii=False).encode() for r in self.records]
        self.jsonl.write_bytes(b"".join(line + b"\n" for line in self.lines))
        self.shards = (shard_ref("a.jsonl", self.jsonl), shard_ref("a.zip", zip_path))

    @staticmethod
    def _pictures() -> Iterator[tuple[str, bytes]]:
        rng = np.random.Generator(np.random.Philox(1))
        for name, (width, height) in SIZES.items():
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
            stored = io.BytesIO()
            image.save(stored, "PNG" if name.endswith("png") else "JPEG")
            data = stored.getvalue()
            yield name, data[: len(data) // 2] if name == "bad.jpg" else data

    def image(self, name: str, max_pixels: int = RULES.max_pixels) -> ImageSpec:
        info, (width, height) = self.members[name], SIZES[name]
        high, wide = target_size(
            height, width, patch=4, merge=2, min_pixels=64, max_pixels=max_pixels
        )
        return ImageSpec(
            shard=1,
            member=name,
            offset=info.header_offset,
            stored_bytes=info.compress_size,
            size_bytes=info.file_size,
            method=info.compress_type,
            crc32=info.CRC,
            width=width,
            height=height,
            target_width=wide,
            target_height=high,
        )

    def item(self, number: int, text: TextRenderer, max_pixels: int = RULES.max_pixels) -> ItemSpec:
        line = self.lines[number]
        record = parse_record(line)
        images = tuple(self.image(name, max_pixels) for name in record.images)
        tokens = text.count(record).text_tokens + sum(num_patches(i) // 4 for i in images)
        offset = sum(len(before) + 1 for before in self.lines[:number])
        return ItemSpec(
            key=f"src/a.jsonl@{offset}",
            source="src",
            layout=record.layout,
            shard=0,
            offset=offset,
            length=len(line),
            crc32=zlib.crc32(line),
            start=0,
            stop=tokens,
            total_tokens=tokens,
            images=images,
            kept_images=len(images),
        )

    def pack(self, *items: ItemSpec, room: int = 7) -> PackSpec:
        tokens = sum(item.stop - item.start for item in items)
        return PackSpec(
            pack_id="0.0.1",
            pack_length=tokens + room,
            shards=self.shards,
            items=items,
            num_tokens=tokens,
            num_patches=sum(num_patches(image) for item in items for image in item.kept),
        )


def talk(question: str, answer: str, image: str | list[str]) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"image": image, "conversations": turns}


def shard_ref(name: str, path: Path) -> ShardRef:
    stat = path.stat()
    return ShardRef(
        source="src",
        name=name,
        url=str(path),
        size_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
    )


def num_patches(image: ImageSpec) -> int:
    return image.target_width * image.target_height // 16
