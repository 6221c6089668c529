"""Turns the bytes of a picture file into uint8 patches of the planned size.

Invariants: the size is compared with the plan's, and with the limit, before anything is decoded;
pixels are those of `pipeline.pixels` (upright RGB over white, the first frame), fully decoded (no
DCT scaling) and resized once, bicubic, only if the planned size differs; every failure is an
ImageError whose reason is a sentence for people and the same each time. Patch order is (h/merge,
w/merge, merge, merge), each patch (channel, row, column): the order of Qwen-VL's processor without
the temporal repeat.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, features

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError
from dataservice.pipeline.pixels import load_rgb, planned_header
from dataservice.storage.probe import MAX_PIXELS


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    deadline_s: float = 30.0
    """For one picture, from when its decode starts."""
    max_pixels: int = MAX_PIXELS
    """Width times height as the file's header says; the index has the same limit."""
    read_deadline_s: float = 120.0
    """For what one thread reads in a row: a picture, or its share of a pack's records. Above the
    reader's own deadline with its retries, which should come first."""


Prepared = Callable[[NDArray[np.uint8]], None]
"""A decoded picture: writes its patches into `out` uint8 [P, F], C-contiguous, and does so fast."""


class Decoder(Protocol):
    """Thread-safe. What builds a pack from pictures: `ImageDecoder`, or one in another process."""

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        """The file's bytes, decoded to the planned size; raises ImageError."""


class ImageDecoder:
    """Decodes in the thread that calls."""

    def __init__(self, rules: VisionRules, limits: DecodeLimits) -> None:
        self._rules = rules
        self._limits = limits

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        pixels = decode_pixels(data, image, self._limits)
        return lambda out: patchify(pixels, self._rules, out)


def decode_pixels(data: bytes, spec: ImageSpec, limits: DecodeLimits) -> NDArray[np.uint8]:
    """The picture upright in its planned size, uint8 [target_height, target_width, 3].

    Raises ImageError when it is no picture, damaged, above the limit or of another size than the
    plan's.
    """
    header = planned_header(data, spec.width, spec.height, limits.max_pixels)
    rgb = load_rgb(data, header)
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
