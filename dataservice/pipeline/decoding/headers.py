"""What is checked of a picture before anything of it is decoded or allocated.

Invariants: size, format and turn come from `storage.probe`, so that what is served has the size
that was indexed; every failure is an ImageError whose reason is a sentence for people, the same
each time.
"""

from __future__ import annotations

from dataservice.errors import ImageError
from dataservice.pipeline.decoding.by_pillow import FORMATS
from dataservice.pipeline.decoding.limits import DecodeLimits
from dataservice.pipeline.decoding.whole_jpeg import only_scan
from dataservice.storage.probe import ImageHeader, probe

_ANIMATED = 0x02
_ANIMATION_COST = 4
"""Times the memory of a still picture that the first picture of an animated WebP takes."""
_MAX_SCANS = 300
"""Of a JPEG of the most pixels that are allowed; a smaller one may have more. An empty scan costs
0.05 ns a pixel, so that no file takes longer than about 3 s for its scans alone."""
_SCAN_BYTES = 10
"""The least that a scan takes in a file."""


def planned_header(data: bytes, width: int, height: int, limits: DecodeLimits) -> ImageHeader:
    """The header of a picture that the index has in that upright size. Raises ImageError.

    In a compressed archive the index does not look behind a PNG's pixels, where its orientation
    may stand; the picture is turned as the index has it.
    """
    header = picture_header(data, limits)
    if (header.width, header.height) != (width, height) and header.format == "PNG":
        header = picture_header(data, limits, look_behind=False)
    if (header.width, header.height) != (width, height):
        raise ImageError(
            f"{header.format} is {header.width}x{header.height} pixels upright, "
            f"the index says {width}x{height}"
        )
    return header


def picture_header(data: bytes, limits: DecodeLimits, *, look_behind: bool = True) -> ImageHeader:
    """Upright size, format and turn. Raises ImageError, also for a picture above the limits.

    `look_behind`: whether an orientation behind the pixels counts.
    """
    check_bytes(len(data), limits)
    header = probe(
        lambda offset, size: data[offset : offset + size],
        len(data),
        head=data,
        look_behind=look_behind,
    )
    if header.format not in FORMATS:
        raise ImageError(f"unsupported format: {header.format}")
    num_pixels = header.width * header.height
    what, most = header.format, limits.max_pixels
    if header.format == "WEBP" and data[12:16] == b"VP8X" and data[20] & _ANIMATED:
        what, most = "animated WEBP", most // _ANIMATION_COST
    if num_pixels > most:
        raise ImageError(
            f"too many pixels: {what} of {header.width}x{header.height}, the limit is {most}"
        )
    if header.format == "JPEG":
        _check_scans(data, header, limits.max_pixels)
    return header


def check_bytes(size_bytes: int, limits: DecodeLimits) -> None:
    """Raises ImageError for a file above the limit."""
    if size_bytes > limits.max_bytes:
        raise ImageError(
            f"too large: a file of {size_bytes} bytes, the limit is {limits.max_bytes}"
        )


def _check_scans(data: bytes, header: ImageHeader, max_pixels: int) -> None:
    most = _MAX_SCANS * max_pixels // (header.width * header.height)
    if len(data) // _SCAN_BYTES <= most or only_scan(data) >= 0:
        return
    scans = data.count(b"\xff\xda")
    if scans > most:
        raise ImageError(
            f"too many pixels: JPEG of {header.width}x{header.height} in {scans} scans"
        )
