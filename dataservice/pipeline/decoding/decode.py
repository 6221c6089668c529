"""Bytes and planned size -> pixels: the checks, the decoder of the format, the colours, the turn.

Invariants: what is returned depends on the bytes, the size and the rules alone; size and cost are
checked before anything is decoded; every failure is an ImageError whose reason is a sentence for
people, the same each time.
"""

from __future__ import annotations

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.decoding import by_pillow, icc, jpeg, png, webp
from dataservice.pipeline.decoding.colours import over
from dataservice.pipeline.decoding.headers import planned_header
from dataservice.pipeline.decoding.limits import DecodeLimits
from dataservice.pipeline.decoding.raster import Decoded, Raster
from dataservice.pipeline.decoding.turns import upright, upright_box
from dataservice.storage.probe import ImageHeader

Size = tuple[int, int]
"""(width, height) in pixels."""


def decode(data: bytes, image: ImageSpec, rules: VisionRules, limits: DecodeLimits) -> Decoded:
    """The picture, at least as large as planned or whole. Raises ImageError when it is no picture,
    damaged, above a limit or of another size than the plan's.

    Unless the rules say `exact`, a JPEG is decoded at a half, a quarter or an eighth of its size
    where that is still at least the planned size on both sides.
    """
    header = planned_header(data, image.width, image.height, limits)
    if rules.exact:
        return decode_whole(data, header, rules)
    return _decode(data, header, rules, (image.target_width, image.target_height))


def decode_whole(data: bytes, header: ImageHeader, rules: VisionRules) -> Decoded:
    """The picture in its own size. Raises ImageError. `header`: as `headers` gives it."""
    return _decode(data, header, rules, (header.width, header.height))


def _decode(data: bytes, header: ImageHeader, rules: VisionRules, least: Size) -> Decoded:
    """`least`: the upright size that is enough."""
    raster = icc.applied(_stored(data, header, rules, least))
    pixels = upright(over(raster, rules.background), header.orientation)
    width, height = header.stored
    box = (0.0, 0.0, width / raster.scale, height / raster.scale)
    box = upright_box(
        box, -(-width // raster.scale), -(-height // raster.scale), header.orientation
    )
    if pixels.shape[:2] != (-(-header.height // raster.scale), -(-header.width // raster.scale)):
        raise by_pillow.other_size((pixels.shape[1], pixels.shape[0]), header)
    return Decoded(pixels=pixels, box=box)


def _stored(data: bytes, header: ImageHeader, rules: VisionRules, least: Size) -> Raster:
    if header.format == "JPEG":
        enough = least if header.orientation < 5 else least[::-1]
        return jpeg.decode(data, header, enough, with_icc=rules.icc)
    if header.format == "PNG":
        return png.decode(data, header, with_icc=rules.icc)
    if header.format == "WEBP":
        return webp.decode(data, header, with_icc=rules.icc)
    return by_pillow.load(data, header, None if rules.icc else b"")
