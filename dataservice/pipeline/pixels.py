"""The bytes of a picture file -> its first picture, upright, in RGB.

Invariants: size, format and turn come from `storage.probe`, so that what is served has the size
that was indexed, and nothing is decoded when they are refused; every failure is an ImageError whose
reason is a sentence for people, the same each time. What is transparent lies over white; samples of
16 bits become round(v / 257); CMYK of a JPEG is read as Adobe writes it (inverted); ICC profiles
are not applied; metadata is not believed and never costs the picture: text and profiles of a PNG
are not even read. Importing this module switches off Pillow's own size limit and its warnings: both
are replaced by the checks here.
"""

from __future__ import annotations

import importlib
import io
import re
import struct
import warnings
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from dataservice.errors import ImageError
from dataservice.storage.probe import ImageHeader, probe

Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module=r"PIL\.")

_MODULES = {
    "AVIF": "Avif",
    "BMP": "Bmp",
    "GIF": "Gif",
    "JPEG": "Jpeg",
    "JPEG2000": "Jpeg2K",
    "PNG": "Png",
    "PPM": "Ppm",
    "TIFF": "Tiff",
    "WEBP": "WebP",
}
for _module in _MODULES.values():
    importlib.import_module(f"PIL.{_module}ImagePlugin")
FORMATS = tuple(name for name in _MODULES if name in Image.OPEN)
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
_WHITE = (255, 255, 255)
_EXTRAS = frozenset((b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf"))
"""Chunks of a PNG that say nothing of its pixels."""
_MAX_SCANS = 300
"""Of a JPEG of the most pixels that are allowed; a smaller one may have more. An empty scan costs
0.05 ns a pixel, so that no file takes longer than about 3 s for its scans alone."""
_SCAN_BYTES = 10
"""The least that a scan takes in a file."""


def planned_header(data: bytes, width: int, height: int, max_pixels: int) -> ImageHeader:
    """The header of a picture that the index has in that upright size. Raises ImageError.

    In a compressed archive the index does not look behind a PNG's pixels, where its orientation
    may stand; the picture is turned as the index has it.
    """
    header = picture_header(data, max_pixels)
    if (header.width, header.height) != (width, height) and header.format == "PNG":
        header = picture_header(data, max_pixels, look_behind=False)
    if (header.width, header.height) != (width, height):
        raise ImageError(
            f"{header.format} is {header.width}x{header.height} pixels upright, "
            f"the index says {width}x{height}"
        )
    return header


def picture_header(data: bytes, max_pixels: int, *, look_behind: bool = True) -> ImageHeader:
    """Upright size, format and turn. Raises ImageError, also when it has more than `max_pixels`.

    `look_behind`: whether an orientation behind the pixels counts.
    """
    header = probe(
        lambda offset, size: data[offset : offset + size],
        len(data),
        head=data,
        look_behind=look_behind,
    )
    if header.format not in FORMATS:
        raise ImageError(f"unsupported format: {header.format}")
    num_pixels = header.width * header.height
    if num_pixels > max_pixels:
        raise ImageError(
            f"too many pixels: {header.format} of {header.width}x{header.height}, "
            f"the limit is {max_pixels}"
        )
    if header.format == "JPEG":
        _check_scans(data, header, max_pixels)
    return header


def _check_scans(data: bytes, header: ImageHeader, max_pixels: int) -> None:
    most = _MAX_SCANS * max_pixels // (header.width * header.height)
    if len(data) // _SCAN_BYTES <= most:
        return
    scans = data.count(b"\xff\xda")
    if scans > most:
        raise ImageError(
            f"too many pixels: JPEG of {header.width}x{header.height} in {scans} scans"
        )


def load_rgb(data: bytes, header: ImageHeader) -> Image.Image:
    """The picture upright, mode RGB, of the header's size. Raises ImageError."""
    name = header.format
    if name == "WEBP" and int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise ImageError(f"truncated {name}: its header says more bytes than the file has")
    try:
        with _open(data, name) as image:
            image.load()
            rgb = _rgb(image, _sample_bits(data, name))
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # Pillow raises nearly anything on damaged files
        raise ImageError(_sentence(name, error)) from error
    turn = _TURNS.get(header.orientation)
    upright = rgb if turn is None else rgb.transpose(turn)
    if upright.size != (header.width, header.height):
        raise ImageError(
            f"corrupt {name}: {upright.width}x{upright.height} pixels, "
            f"its header says {header.width}x{header.height}"
        )
    return upright


def _open(data: bytes, name: str) -> Image.Image:
    if name == "JPEG":
        # Not through Image.open, which looks for further pictures behind the first.
        return JpegImageFile(io.BytesIO(data))
    if name == "PNG":
        data = _bare_png(data)
    return Image.open(io.BytesIO(data), formats=(name,))


def _bare_png(data: bytes) -> bytes:
    """Without the chunks that a reader would inflate and parse for nothing; the rest is checked."""
    kept: list[bytes] = []
    start = at = 8
    view = memoryview(data)
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + length + 12
        if kind in _EXTRAS:
            kept.append(data[start:at])
            start = end
        elif end <= len(data):
            if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise ImageError(f"corrupt PNG: a wrong CRC of chunk {kind.decode('latin-1')!r}")
            if kind == b"IEND":
                break
        at = end
    return data if not kept else data[:8] + b"".join(kept) + data[start:]


def _sample_bits(data: bytes, name: str) -> int:
    """Of a PNG, as its header says; 8 for the others."""
    return data[24] if name == "PNG" else 8


def _rgb(image: Image.Image, bits: int) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ImageError(f"unsupported format: {image.format} with samples of 32 bits")
    transparent = image.info.get("transparency")
    if transparent is not None and image.mode in ("L", "RGB"):
        image.info["transparency"] = _to_8_bits(transparent, bits)
    if image.has_transparency_data:
        return _over_white(image if image.mode == "RGBA" else image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    alpha = image.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return image.convert("RGB")
    rgb = Image.new("RGB", image.size, _WHITE)
    rgb.paste(image, mask=alpha)
    return rgb


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    gray = to_8_bits(values)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return Image.fromarray(gray).convert("RGB")


def to_8_bits(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """round(v / 257) of samples of 16 bits, of any integer type, clipped to that range."""
    return ((np.clip(values, 0, 0xFFFF).astype(np.uint32) + 128) // 257).astype(np.uint8)


def _to_8_bits(value: int | tuple[int, ...], bits: int) -> int | tuple[int, ...]:
    """A transparent colour, in the file's bits, as the pixels of that colour read."""
    if isinstance(value, tuple):
        return tuple(part >> 8 if bits == 16 else part & 0xFF for part in value)
    return value * 255 // ((1 << bits) - 1) if bits < 8 else value & 0xFF


def _sentence(name: str, error: Exception) -> str:
    text = re.sub(r" ?<[^>]* object at 0x[0-9a-f]+>", "", str(error)) or type(error).__name__
    if isinstance(error, NotImplementedError) or re.search("not (available|installed)", text):
        return f"unsupported format: {name}: {text}"
    return f"{'truncated' if 'truncated' in text.lower() else 'corrupt'} {name}: {text}"
