"""Decoders beside ours, format by format and size by size, on one core.

Each candidate turns a file's bytes into the patches of the planned size in the way its makers
recommend; what is decoded and how it is resized stands in its name. Every picture is measured by
every candidate in turn, in the CPU time of the one thread, best of the rounds. A candidate is
compared with ours over the pictures that it takes: what it refuses it cannot be slow at.
"Deviation" is the mean absolute difference from Pillow's pixels (full decode, bicubic), 0 to 255.

Pictures that are stored turned are left out: only some of the candidates turn them.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from decode_corpus import make_config, planned_packs, read_pictures, source_names
from figures import Figure
from numpy.typing import NDArray
from PIL import Image, ImageOps
from reports import Report, aligned

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits, ImageDecoder

Pixels = NDArray[np.uint8]
Decode = Callable[[bytes, ImageSpec], Any]
Resize = Callable[[Any, tuple[int, int]], Pixels]

CLASSES = ((0.1, "below 0.1 MP"), (0.5, "0.1 to 0.5 MP"), (2.0, "0.5 to 2 MP"), (8.0, "2 to 8 MP"))
LARGEST = "8 MP and more"
OURS = ("ours, exact", "ours")
REFERENCE = "Pillow"
EXIF_TURN = 0x0112


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    name: str
    formats: tuple[str, ...]
    patches: Callable[[bytes, ImageSpec], Pixels]


@dataclass(kw_only=True)
class Picture:
    image: ImageSpec
    data: bytes
    seconds: dict[str, float] = field(default_factory=dict)
    """By candidate; those that refuse it are missing."""
    deviation: dict[str, float] = field(default_factory=dict)

    @property
    def megapixels(self) -> float:
        return self.image.width * self.image.height / 1e6


# ---- the candidates ------------------------------------------------------------------------------


def candidates(rules: VisionRules) -> list[Candidate]:
    every = ("JPEG", "PNG", "WEBP", "GIF")
    made = [
        Candidate(name=REFERENCE, formats=every, patches=way(rules, pillow, by_pillow)),
        Candidate(
            name="Pillow, draft", formats=("JPEG",), patches=way(rules, pillow_draft, by_pillow)
        ),
        *with_simplejpeg(rules),
        *with_imagecodecs(rules),
        *with_opencv(rules),
    ]
    for name, exact in zip(OURS, (True, False), strict=True):
        made.append(Candidate(name=name, formats=every, patches=ours(rules, exact)))
    return made


def way(rules: VisionRules, decode: Decode, resize: Resize) -> Callable[..., Pixels]:
    def patches(data: bytes, image: ImageSpec) -> Pixels:
        return patchified(resize(decode(data, image), target_of(image)), rules)

    return patches


def target_of(image: ImageSpec) -> tuple[int, int]:
    return image.target_width, image.target_height


def patchified(pixels: Pixels, rules: VisionRules) -> Pixels:
    p, m = rules.patch, rules.merge
    rows, columns = pixels.shape[0] // (p * m), pixels.shape[1] // (p * m)
    blocks = pixels.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(blocks).reshape(-1, 3 * p * p)


def pillow(data: bytes, image: ImageSpec, *, draft: bool = False) -> Image.Image:
    with Image.open(io.BytesIO(data)) as opened:
        if draft:
            opened.draft("RGB", target_of(image))
        return over_white(ImageOps.exif_transpose(opened))


def pillow_draft(data: bytes, image: ImageSpec) -> Image.Image:
    return pillow(data, image, draft=True)


def by_pillow(decoded: Any, size: tuple[int, int]) -> Pixels:
    picture = decoded if isinstance(decoded, Image.Image) else Image.fromarray(decoded)
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(picture)


def with_simplejpeg(rules: VisionRules) -> list[Candidate]:
    import simplejpeg

    def whole(data: bytes, _: ImageSpec) -> Pixels:
        return simplejpeg.decode_jpeg(data)

    def scaled(data: bytes, image: ImageSpec) -> Pixels:
        return simplejpeg.decode_jpeg(
            data, min_width=image.target_width, min_height=image.target_height, min_factor=1
        )

    return [
        Candidate(
            name="simplejpeg + Pillow's resize",
            formats=("JPEG",),
            patches=way(rules, whole, by_pillow),
        ),
        Candidate(
            name="simplejpeg, DCT-scaled + Pillow's resize",
            formats=("JPEG",),
            patches=way(rules, scaled, by_pillow),
        ),
    ]


def with_imagecodecs(rules: VisionRules) -> list[Candidate]:
    import imagecodecs

    decoders = {
        "JPEG": imagecodecs.jpeg8_decode,
        "PNG": imagecodecs.png_decode,
        "WEBP": imagecodecs.webp_decode,
    }

    def decode(data: bytes, _: ImageSpec) -> Image.Image:
        return rgb(decoders[format_of(data)](data))

    return [
        Candidate(
            name="imagecodecs + Pillow's resize",
            formats=tuple(decoders),
            patches=way(rules, decode, by_pillow),
        )
    ]


def rgb(pixels: Pixels) -> Image.Image:
    """As `over_white`; 16 bits are refused, they would need a rule of their own."""
    if pixels.dtype != np.uint8:
        raise ValueError(f"{pixels.dtype} is not taken")
    return over_white(Image.fromarray(pixels.squeeze()))


def over_white(picture: Image.Image) -> Image.Image:
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def with_opencv(rules: VisionRules) -> list[Candidate]:
    try:
        import cv2
    except ImportError:
        return []
    cv2.setNumThreads(1)
    reduced = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}

    def whole(data: bytes, _: ImageSpec, flags: int = cv2.IMREAD_COLOR) -> Pixels:
        return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), flags), cv2.COLOR_BGR2RGB)

    def scaled(data: bytes, image: ImageSpec) -> Pixels:
        share = min(image.width / image.target_width, image.height / image.target_height)
        factor = max((f for f in reduced if f <= share), default=1)
        return whole(data, image, reduced.get(factor, cv2.IMREAD_COLOR))

    def resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
        return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)

    return [
        Candidate(
            name="OpenCV, area", formats=("JPEG", "PNG", "WEBP"), patches=way(rules, whole, resize)
        ),
        Candidate(
            name="OpenCV, DCT-scaled, area", formats=("JPEG",), patches=way(rules, scaled, resize)
        ),
    ]


def ours(rules: VisionRules, exact: bool) -> Callable[[bytes, ImageSpec], Pixels]:
    decoder = ImageDecoder(replace(rules, exact=exact), DecodeLimits())

    def patches(data: bytes, image: ImageSpec) -> Pixels:
        count = image.target_width * image.target_height // rules.patch**2
        out = np.empty((count, 3 * rules.patch**2), np.uint8)
        decoder.prepare(data, image)(out)
        return out

    return patches


# ---- pictures ------------------------------------------------------------------------------------


def format_of(data: bytes) -> str:
    for start, name in ((b"\xff\xd8", "JPEG"), (b"\x89PNG", "PNG"), (b"GIF8", "GIF")):
        if data.startswith(start):
            return name
    return "WEBP" if data[8:12] == b"WEBP" else "other"


def class_of(picture: Picture) -> str:
    return next((name for limit, name in CLASSES if picture.megapixels < limit), LARGEST)


def is_turned(data: bytes) -> bool:
    with Image.open(io.BytesIO(data)) as opened:
        return opened.getexif().get(EXIF_TURN, 1) != 1


def sampled(corpus: Path, folder: Path, most: int) -> dict[tuple[str, str], list[Picture]]:
    """At most so many pictures of each format and size, as they come in the plan."""
    config = make_config(corpus, source_names(corpus), folder, threads=1)
    groups: dict[tuple[str, str], list[Picture]] = {}
    for image, data in read_pictures(planned_packs(config, 10**6)):
        picture = Picture(image=image, data=data)
        group = groups.setdefault((format_of(data), class_of(picture)), [])
        if len(group) < most and not is_turned(data):
            group.append(picture)
    order = [name for _, name in CLASSES] + [LARGEST]
    keys = sorted(groups, key=lambda key: (key[0], order.index(key[1])))
    return {key: groups[key] for key in keys if groups[key]}


def measure(pictures: Sequence[Picture], format_: str, rules: VisionRules, rounds: int) -> None:
    usable = [c for c in candidates(rules) if format_ in c.formats]
    for picture in pictures:
        truth = None
        for turn in range(rounds + 1):  # the first warms up, and is compared
            for candidate in usable:
                if turn > 0 and candidate.name not in picture.deviation:
                    continue
                began = time.thread_time()
                try:
                    made = candidate.patches(picture.data, picture.image)
                except Exception as error:
                    if candidate.name in (REFERENCE, *OURS):
                        where = f"{candidate.name}: {picture.image.member}"
                        raise SystemExit(f"{where}: {error}") from error
                    continue
                seconds = time.thread_time() - began
                if turn == 0:
                    truth = made if truth is None else truth
                    difference = np.abs(made.astype(np.int16) - truth)
                    picture.deviation[candidate.name] = float(difference.mean())
                else:
                    best = picture.seconds.get(candidate.name, seconds)
                    picture.seconds[candidate.name] = min(best, seconds)


def rows_of(pictures: Sequence[Picture]) -> list[list[str]]:
    names = sorted({name for p in pictures for name in p.seconds}, key=lambda n: (n in OURS, n))
    rows = []
    for name in names:
        taken = [p for p in pictures if name in p.seconds]
        seconds = sum(p.seconds[name] for p in taken)
        refused = len(pictures) - len(taken)
        rows.append(
            [
                name,
                f"{len(taken)}" + (f" of {len(pictures)}" if refused else ""),
                f"{len(taken) / seconds:.1f}",
                f"{sum(p.megapixels for p in taken) / seconds:.1f}",
                *(f"{sum(p.seconds[o] for p in taken) / seconds:.2f}" for o in OURS),
                f"{np.mean([p.deviation[name] for p in taken]):.2f}",
            ]
        )
    return rows


def run(corpus: Path, folder: Path, quick: bool) -> Report:
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None
    rules = VisionRules()
    head = ["", "pictures", "images/s", "MP/s", "x exact", "x ours", "deviation"]
    lines: list[str] = []
    groups = sampled(corpus, folder, 3 if quick else 24)
    for (format_, size), pictures in groups.items():
        if format_ == "other":
            continue
        measure(pictures, format_, rules, 1 if quick else 5)
        megapixels = np.mean([p.megapixels for p in pictures])
        lines += ["", f"{format_}, {size}: {len(pictures)} pictures, mean {megapixels:.2f} MP"]
        lines += aligned([head, *rows_of(pictures)])
    return Report(lines=lines, figures=list(figures_of(groups)))


def figures_of(groups: dict[tuple[str, str], list[Picture]]) -> Iterator[Figure]:
    for format_ in sorted({key[0] for key in groups if key[0] != "other"}):
        pictures = [p for key, found in groups.items() if key[0] == format_ for p in found]
        exact, scaled = (
            sum(p.seconds[REFERENCE] for p in pictures) / sum(p.seconds[name] for p in pictures)
            for name in OURS
        )
        yield Figure(
            name=f"{format_}: ours over Pillow, all sizes",
            value=scaled,
            unit="x",
            note=f"exact {exact:.2f} x; {len(pictures)} pictures",
        )
