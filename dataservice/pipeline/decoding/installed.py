"""Which decoders are installed: checked at start, and named so that no two sorts are mixed.

Invariants: two machines with the same fingerprint give the same pixels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import platform
from typing import Any

import imagecodecs
import numpy as np
import PIL
import simplejpeg
from PIL import Image, features

from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError
from dataservice.pipeline import resampling
from dataservice.pipeline.decoding.by_pillow import FORMATS
from dataservice.pipeline.decoding.decode import decode_whole
from dataservice.pipeline.decoding.headers import picture_header
from dataservice.pipeline.decoding.limits import DecodeLimits

_NEEDED = ("jpg", "zlib", "webp", "littlecms2")
_NAMED = ("libjpeg_turbo", "zlib", "zlib_ng", "webp", "avif", "libtiff", "jpg_2000", "littlecms2")
_REMEDY = "`pip uninstall pillow pillow-simd`, then `pip install pillow`"
_MODES = {
    "PNG": ("RGB", "RGBA", "P", "L", "LA", "1"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("RGB", "L"),
}
_SAVED: dict[str, dict[str, object]] = {"JPEG": {"quality": 90}, "WEBP": {"quality": 80}}
"""How the probe pictures are written; formats that this build of Pillow cannot write have none."""


@functools.cache
def decoder_fingerprint() -> str:
    """Libraries, codecs and the machine's kind, and a digest of the pixels that come of a small
    picture in each format, resized both ways: builds that round in another way differ in it."""
    simple = f"simplejpeg {simplejpeg.__version__}"
    fast = f"imagecodecs {imagecodecs.__version__}"
    codecs = [f"{name} {version}" for name in _NAMED if (version := features.version(name))]
    parts = [f"pillow {PIL.__version__}", *codecs, simple, fast, imagecodecs.deflate_version()]
    parts += [imagecodecs.webp_version(), f"resampling {resampling.VERSION}", platform.machine()]
    return ", ".join([*parts, f"probe {_probe_digest()}"])


def _probe_digest() -> str:
    steps = np.arange(97 * 61 * 4, dtype=np.uint64)
    noise = (steps * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)
    source = Image.fromarray(noise.reshape(61, 97, 4))
    digest, limits, rules = hashlib.sha256(), DecodeLimits(), VisionRules()
    for name in FORMATS:
        for mode in _MODES.get(name, ("RGB",)):
            stored = io.BytesIO()
            try:
                source.convert(mode).save(stored, name, **_SAVED.get(name, {}))
            except (KeyError, OSError):
                digest.update(b"none")
                continue
            data = stored.getvalue()
            pixels = decode_whole(data, picture_header(data, limits), rules).pixels
            digest.update(pixels[:, :, :3].tobytes())
    for size in ((28, 28), (196, 140)):
        digest.update(resampling.resample(pixels, *size).tobytes())
    return digest.hexdigest()[:12]


def check_decoders() -> None:
    """Start-up check: Pillow itself, whole and alone, and the decoders beside it. Raises
    ConfigError with the remedy."""
    installed = {name: _version(name) for name in ("pillow", "pillow-simd")}
    if installed["pillow-simd"]:
        raise ConfigError(
            f"pillow-simd {installed['pillow-simd']} is installed; its resize rounds in another "
            f"way than Pillow's, and it overwrites Pillow's files: {_REMEDY}"
        )
    if installed["pillow"] not in (None, PIL.__version__):
        raise ConfigError(
            f"pillow {installed['pillow']} is installed, but the files are those of "
            f"{PIL.__version__}: {_REMEDY}"
        )
    lacking = [codec for codec in _NEEDED if not features.check(codec)]
    if lacking:
        raise ConfigError(
            f"Pillow {PIL.__version__} was built without {', '.join(lacking)}: {_REMEDY}, which "
            "takes a wheel that has them"
        )
    parts: dict[str, Any] = {"libdeflate": imagecodecs.DEFLATE, "libwebp": imagecodecs.WEBP}
    absent = [name for name, part in parts.items() if not part.available]
    if absent:
        raise ConfigError(
            f"imagecodecs {imagecodecs.__version__} was built without {', '.join(absent)}: "
            "`pip install --force-reinstall --only-binary imagecodecs imagecodecs`"
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
