"""Turns the bytes of a picture file into uint8 patches of the planned size.

Invariants: the size is compared with the plan's, and with the limit, before anything is decoded;
pixels are upright (EXIF), RGB, fully decoded (no DCT scaling) and resized once, bicubic, only if
the planned size differs; the first frame counts; every failure is an ImageError whose reason is a
sentence for people and the same each time. Patch order is (h/merge, w/merge, merge, merge), each
patch (channel, row, column): the order of Qwen-VL's processor without the temporal repeat.
Importing this module switches off Pillow's own size limit and its warnings: both are replaced by
the checks here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import io
import platform
import re
import warnings
from dataclasses import dataclass

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError, features

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError, ImageError

Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module=r"PIL\.")

for _name in ("Avif", "Bmp", "Gif", "Jpeg", "Jpeg2K", "Png", "Ppm", "Tiff", "WebP"):
    # Pillow loads some of them late, and `formats` wants them loaded.
    importlib.import_module(f"PIL.{_name}ImagePlugin")
FORMATS = tuple(
    name
    for name in "AVIF BMP DIB GIF JPEG JPEG2000 PNG PPM TIFF WEBP".split()
    if name in Image.OPEN
)
"""What is tried; Pillow knows more, among them formats that start other programs."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    deadline_s: float = 30.0
    """For one picture, from when its decode starts."""
    max_pixels: int = 178_956_970
    """Width times height as the file's header says; the index has the same limit."""
    read_deadline_s: float = 120.0
    """For what one thread reads in a row: a picture, or its share of a pack's records. Above the
    reader's own deadline with its retries, which should come first."""


def decode_patches(
    data: bytes,
    spec: ImageSpec,
    rules: VisionRules,
    out: NDArray[np.uint8],
    limits: DecodeLimits,
) -> None:
    """Decodes `data` into `out`, uint8 [patches, 3 * patch * patch].

    Raises ImageError when it is no picture, damaged, above the limit or of another size than
    the plan's; `out` is untouched then.
    """
    patchify(decode_pixels(data, spec, limits), rules, out)


def decode_pixels(data: bytes, spec: ImageSpec, limits: DecodeLimits) -> NDArray[np.uint8]:
    """The picture upright in its planned size, uint8 [target_height, target_width, 3]."""
    with _open(data) as image:
        _check_header(image, spec, limits)
        name = image.format or "image"
        try:
            image.load()
            upright = _upright(image)
            # A colour that stands for "transparent" is dropped with the alpha channel.
            upright.info.pop("transparency", None)
            rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises nearly anything on damaged files
            raise ImageError(_sentence(name, error)) from error
    if rgb.size != (spec.width, spec.height):
        raise ImageError(
            f"{name} is {rgb.width}x{rgb.height} pixels upright, "
            f"the index says {spec.width}x{spec.height}"
        )
    target = (spec.target_width, spec.target_height)
    if rgb.size != target:
        rgb = rgb.resize(target, Image.Resampling.BICUBIC)
    return np.asarray(rgb)


def patchify(pixels: NDArray[np.uint8], rules: VisionRules, out: NDArray[np.uint8]) -> None:
    """Copies pixels [H, W, 3] once, into `out` [H/patch * W/patch, 3 * patch * patch].

    H and W are multiples of patch * merge.
    """
    p, m = rules.patch, rules.merge
    rows, columns = pixels.shape[0] // (p * m), pixels.shape[1] // (p * m)
    blocks = pixels.reshape(rows, m, p, columns, m, p, 3)
    view = out.reshape(rows, columns, m, m, 3, p, p, copy=False)
    view[...] = blocks.transpose(0, 3, 1, 4, 6, 2, 5)


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        head = data[:8].hex(" ") or "none, the file is empty"
        raise ImageError(f"not a picture in a known format (first bytes: {head})") from None
    except Exception as error:
        raise ImageError(_sentence("picture", error)) from error


def _check_header(image: Image.Image, spec: ImageSpec, limits: DecodeLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{image.format} of {width}x{height} pixels is above the limit of "
            f"{limits.max_pixels} pixels"
        )
    # Which side is up is known only after some formats are read to their end.
    if (spec.width, spec.height) not in ((width, height), (height, width)):
        raise ImageError(
            f"{image.format} is {width}x{height} pixels, the index says {spec.width}x{spec.height}"
        )


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF is no reason to lose the picture: it counts as absent
        orientation = 1
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _sentence(name: str, error: Exception) -> str:
    text = re.sub(r" ?<[^>]* object at 0x[0-9a-f]+>", "", str(error)) or type(error).__name__
    return f"{'truncated' if 'truncated' in text.lower() else 'damaged'} {name}: {text}"


@functools.cache
def decoder_fingerprint() -> str:
    """Names the decoder; two machines with the same one give the same pixels.

    Library and codec versions, the machine's kind, and a digest of what this build makes of a
    small picture (JPEG decode and bicubic resize both ways), which tells SIMD variants that round
    in another way apart.
    """
    codecs = [f"{name} {features.version(name)}" for name in ("libjpeg_turbo", "zlib", "webp")]
    library = f"{'pillow-simd' if 'post' in PIL.__version__ else 'pillow'} {PIL.__version__}"
    return ", ".join([library, *codecs, platform.machine(), f"probe {_probe_digest()}"])


def _probe_digest() -> str:
    steps = np.arange(97 * 61 * 3, dtype=np.uint64)
    noise = (steps * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)
    source = Image.fromarray(noise.reshape(61, 97, 3))
    stored = io.BytesIO()
    source.save(stored, "JPEG", quality=90)
    digest = hashlib.sha256(stored.getvalue())
    with Image.open(io.BytesIO(stored.getvalue())) as decoded:
        digest.update(decoded.tobytes())
    for size in ((28, 28), (196, 140)):
        digest.update(source.resize(size, Image.Resampling.BICUBIC).tobytes())
    return digest.hexdigest()[:12]


def check_pillow() -> None:
    """Start-up check: exactly one of pillow and pillow-simd, and it reads JPEG, PNG and WebP."""
    installed = {}
    for name in ("pillow", "pillow-simd"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    remedy = (
        "uninstall both (`pip uninstall pillow pillow-simd`), then install the one you want, "
        "pillow-simd with `pip install --no-cache-dir --no-binary pillow-simd pillow-simd`"
    )
    if len(installed) == 2:
        raise ConfigError(
            f"pillow {installed['pillow']} and pillow-simd {installed['pillow-simd']} are both "
            f"installed and overwrite each other's files; {remedy}"
        )
    for name, version in installed.items():
        if version != PIL.__version__:
            raise ConfigError(
                f"{name} {version} is installed, but the files are those of "
                f"{PIL.__version__}; {remedy}"
            )
    lacking = [codec for codec in ("jpg", "zlib", "webp") if not features.check(codec)]
    if lacking:
        raise ConfigError(
            f"Pillow {PIL.__version__} was built without {', '.join(lacking)}; install the "
            f"headers (zlib, libjpeg-turbo, libwebp) and {remedy}"
        )
