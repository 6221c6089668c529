"""Upright size and format of a picture, whatever its format.

Invariants: width and height are those of `PIL.ImageOps.exif_transpose` (EXIF first, then XMP);
pixels are never decoded and no more is read than the headers need: 8 KiB for most; memory is
bounded by what is read, time by a number of steps. A reason says "empty", "truncated", "corrupt",
"no pixels", "too many pixels", "unsupported format" or "not an image".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataservice.core.vision import MAX_ASPECT
from dataservice.errors import ImageError
from dataservice.storage.probe import others
from dataservice.storage.probe.jpeg import jpeg
from dataservice.storage.probe.parts import FIRST_READ_BYTES, Parts, ReadPart
from dataservice.storage.probe.png import png
from dataservice.storage.signatures import picture_format, why_no_picture

MAX_PIXELS = 178_956_970
"""Pillow decodes nothing above it."""
MAX_SIDE = 65_535
_MAX_PIXELS_A_BYTE = 10_000
"""Of a file with more than _FREE_PIXELS. Deflate, LZW and JPEG make less of a picture all in one
colour; a file that claims more shows nothing and costs the memory of a real one."""
_FREE_PIXELS = 16_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    width: int
    """Upright: after the EXIF turn."""
    height: int
    format: str
    """Pillow's name, such as "JPEG"."""
    orientation: int = field(default=1, compare=False)
    """By EXIF, 1 to 8: what a decoder has yet to turn; 1 for a TIFF, which Pillow turns."""

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) before that turn."""
        size = self.width, self.height
        return size if self.orientation < 5 else size[::-1]


def probe(
    read: ReadPart, size_bytes: int, *, head: bytes | None = None, look_behind: bool = True
) -> ImageHeader:
    """Size and format of a picture of `size_bytes` bytes. Raises ImageError, and as `read`.

    `head`: the picture's first bytes where they are there already. `look_behind`: whether an
    orientation that stands behind the pixels of a PNG counts.
    """
    if head is None:
        head = read(0, min(FIRST_READ_BYTES, size_bytes))
    width, height, format_name, orientation = _parse(Parts(read, size_bytes, head), look_behind)
    if orientation >= 5:
        width, height = height, width
    if width < 1 or height < 1:
        raise ImageError(f"no pixels: the header says {width}x{height}")
    if width * height > MAX_PIXELS:
        raise ImageError(f"too many pixels: {width}x{height}, the limit is {MAX_PIXELS}")
    if width > MAX_SIDE or height > MAX_SIDE:
        raise ImageError(f"too many pixels: {width}x{height}, the limit of a side is {MAX_SIDE}")
    if width * height > max(_FREE_PIXELS, _MAX_PIXELS_A_BYTE * size_bytes):
        raise ImageError(
            f"too many pixels or truncated: {width}x{height} in a file of {size_bytes} bytes"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{width}x{height} pixels, more elongated than {MAX_ASPECT:.0f}:1")
    return ImageHeader(width=width, height=height, format=format_name, orientation=orientation)


def _parse(parts: Parts, look_behind: bool) -> tuple[int, int, str, int]:
    name = picture_format(parts.data)
    if name == "JPEG":
        width, height, orientation = jpeg(parts)
    elif name == "PNG":
        width, height, orientation = png(parts, look_behind=look_behind)
    elif name == "WEBP":
        width, height, orientation = others.webp(parts)
    elif name == "GIF":
        width, height, orientation = others.gif(parts)
    elif name == "BMP":
        width, height, orientation = others.bmp(parts)
    elif name == "PPM":
        width, height, orientation = others.ppm(parts)
    elif name is None:
        raise ImageError(why_no_picture(parts.data))
    else:
        width, height, orientation = others.by_pillow(parts, name)
    return width, height, name, orientation
