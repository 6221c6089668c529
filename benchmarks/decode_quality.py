"""How far pixels are from the model's processor where JPEGs are decoded at a part of their size.

`python benchmarks/decode_quality.py FOLDER`, with JPEGs in it or in zips below it. Each picture is
resized to its planned size twice, from the whole picture (`exact: true`) and from a half, quarter
or eighth of it (`exact: false`), and the bytes that the model gets are compared. PSNR is of all
three channels; differences are in steps of 1/255, channel by channel.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import simplejpeg
from figures import machine
from reports import aligned

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules, planned_size
from dataservice.errors import ImageError
from dataservice.pipeline import resampling
from dataservice.pipeline.decoding import DecodeLimits, decode
from dataservice.pipeline.decoding.headers import picture_header

LIMITS = DecodeLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    name: str
    scale: int
    psnr_db: float
    mean: tuple[float, ...]
    """Of the absolute difference, red, green and blue."""
    largest: int


def jpegs(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg"):
            yield str(path.relative_to(folder)), path.read_bytes()
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    if member.lower().endswith((".jpg", ".jpeg")):
                        yield f"{path.relative_to(folder)}/{member}", archive.read(member)


def deviation(name: str, data: bytes, rules: VisionRules) -> Deviation | None:
    """None for a picture that is decoded whole anyhow."""
    header = picture_header(data, LIMITS)
    height, width = planned_size(header.height, header.width, rules)
    spec = ImageSpec(
        shard=0,
        member=name,
        offset=0,
        stored_bytes=len(data),
        size_bytes=len(data),
        method=-1,
        crc32=-1,
        width=header.width,
        height=header.height,
        target_width=width,
        target_height=height,
    )
    part = decode(data, spec, rules, LIMITS)
    scale = round(header.width / (part.box[2] - part.box[0]))
    if scale == 1:
        return None
    whole = decode(data, spec, dataclasses.replace(rules, exact=True), LIMITS)
    ours, exact = (
        resampling.resample(decoded.pixels, width, height, decoded.box).astype(np.int32)
        for decoded in (part, whole)
    )
    off = np.abs(ours - exact)
    error = float((off**2).mean())
    return Deviation(
        name=name,
        scale=scale,
        psnr_db=10 * math.log10(255**2 / error) if error else math.inf,
        mean=tuple(off.mean(axis=(0, 1)).tolist()),
        largest=int(off.max()),
    )


def rows(found: list[Deviation]) -> list[list[str]]:
    table = [
        [
            "decoded at",
            "pictures",
            "PSNR dB",
            "least",
            "mean |d| R",
            "G",
            "B",
            "most",
            "largest |d|",
        ]
    ]
    for scale in sorted({one.scale for one in found}):
        group = [one for one in found if one.scale == scale]
        means = [statistics.mean(one.mean[c] for one in group) for c in range(3)]
        table.append(
            [
                f"1/{scale}",
                str(len(group)),
                f"{statistics.mean(one.psnr_db for one in group):.1f}",
                f"{min(one.psnr_db for one in group):.1f}",
                *(f"{mean:.2f}" for mean in means),
                f"{max(max(one.mean) for one in group):.2f}",
                str(max(one.largest for one in group)),
            ]
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-pixels", type=int, default=VisionRules().max_pixels)
    options = parser.parse_args()
    rules = VisionRules(max_pixels=options.max_pixels)
    print(f"command   python benchmarks/decode_quality.py {' '.join(sys.argv[1:])}")
    print(f"machine   {machine()}")
    versions = f"simplejpeg {simplejpeg.__version__}, Pillow {PIL.__version__}"
    print(f"versions  Python {sys.version.split()[0]}, numpy {np.__version__}, {versions}\n")
    found: list[Deviation] = []
    whole = bad = 0
    for name, data in jpegs(options.folder):
        try:
            one = deviation(name, data, rules)
        except ImageError as error:
            print(f"{name}: {error}")
            bad += 1
            continue
        if one is None:
            whole += 1
        else:
            found.append(one)
    print(f"{len(found) + whole} JPEGs, {whole} of them decoded whole anyhow, {bad} refused")
    if found:
        print("\n".join(aligned(rows(found))))
        worst = min(found, key=lambda one: one.psnr_db)
        print(f"least alike: {worst.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
