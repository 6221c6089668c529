"""An independent reading of LLaVA samples by PIL, json, zipfile and numpy alone.

It says what text and which patches a sample must have, so that delivered packs can be compared.
"""

import functools
import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SPECIALS = {
    256: "<|endoftext|>",
    257: "<|im_start|>",
    258: "<|im_end|>",
    259: "<|vision_start|>",
    260: "<|vision_end|>",
    261: "<|image_pad|>",
}
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class Vision:
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int


@functools.lru_cache(maxsize=64)
def _archive(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def record_of(root: Path, sample_key: str) -> tuple[dict, Path]:
    """The JSON record of "<source>/<shard>@<offset>", and its shard's path."""
    where, _, offset = sample_key.rpartition("@")
    source, _, shard = where.partition("/")
    path = root / source / shard
    with path.open("rb") as lines:
        lines.seek(int(offset))
        return json.loads(lines.readline()), path


def images_of(record: dict) -> list[str]:
    names = record.get("image") or []
    return [names] if isinstance(names, str) else list(names)


def resized(height: int, width: int, vision: Vision) -> tuple[int, int]:
    factor = vision.patch * vision.merge
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > vision.max_pixels:
        shrink = math.sqrt(height * width / vision.max_pixels)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < vision.min_pixels:
        grow = math.sqrt(vision.min_pixels / (height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide


def over_white(image: Image.Image) -> Image.Image:
    """RGB; what is transparent shows white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    values = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = values[..., 3:] / 255
    return Image.fromarray(np.rint(values[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))


def patches_of(data: bytes, vision: Vision) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 [P, 3 * patch * patch] and (rows, columns) in patches."""
    image = over_white(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    tall, wide = resized(image.height, image.width, vision)
    if image.size != (wide, tall):
        image = image.resize((wide, tall), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    p, m = vision.patch, vision.merge
    rows, columns = tall // p, wide // p
    blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, 3)
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return ordered.reshape(rows * columns, 3 * p * p), (rows, columns)


def sample_images(record: dict, shard: Path, vision: Vision) -> list[tuple[np.ndarray, tuple]]:
    archive = _archive(shard.with_suffix(".zip")) if images_of(record) else None
    return [patches_of(archive.read(name), vision) for name in images_of(record)]


def sample_text(record: dict, grids: list[tuple[int, int]], vision: Vision) -> str:
    """ChatML, with each image's tokens in place of its placeholder."""
    if "text" in record:
        return record["text"] + SPECIALS[256]
    pads = iter(
        "<|vision_start|>" + "<|image_pad|>" * (r * c // vision.merge**2) + "<|vision_end|>"
        for r, c in grids
    )
    parts = []
    for turn in record["conversations"]:
        pieces = turn["value"].split("<image>") if grids else [turn["value"]]
        text = pieces[0] + "".join(next(pads) + piece for piece in pieces[1:])
        parts.append(f"<|im_start|>{ROLES[turn['from']]}\n{text}<|im_end|>\n")
    return "".join(parts)


def spelled(ids: np.ndarray) -> bytes:
    """Byte tokens as they are, special tokens by name."""
    return b"".join(bytes([i]) if i < 256 else SPECIALS[i].encode() for i in ids.tolist())
