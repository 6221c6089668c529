"""The decoders: ours, and what the peers' own documentation offers.

Invariants: each takes the file's bytes, resizes once to the same size, bicubic, and hands over a
`Picture`; all are safe in threads.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from peers.work import RULES, Array, Decode, Picture, Setup, planned_size, resized

ORIENTATION = 0x0112
"""The EXIF tag."""
Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", message="Palette images with Transparency")


def ours(*, exact: bool) -> Decode:
    """As a worker of the service decodes: to the planned size, straight into the pack."""
    decoder = ImageDecoder(VisionRules(exact=exact), DecodeLimits())

    def decode(data: bytes) -> Picture:
        height, width, target_height, target_width = planned_size(data)
        spec = ImageSpec(
            shard=0,
            member="",
            offset=0,
            stored_bytes=len(data),
            size_bytes=len(data),
            method=-1,
            crc32=-1,
            width=width,
            height=height,
            target_width=target_width,
            target_height=target_height,
        )
        return Picture(target_height, target_width, decoder.prepare(data, spec))

    return decode


def pillow(data: bytes) -> Picture:
    """A full decode, as the documentation of torch, WebDataset, Energon and Streaming has it."""
    with Image.open(io.BytesIO(data)) as picture:
        return from_pil(picture)


def pillow_draft(data: bytes) -> Picture:
    """Pillow's `draft`: a JPEG is decoded at the smallest of its scales that is large enough."""
    *_, height, width = planned_size(data)
    with Image.open(io.BytesIO(data)) as picture:
        turned = picture.getexif().get(ORIENTATION, 1) >= 5
        picture.draft("RGB", (height, width) if turned else (width, height))
        return from_pil(picture, size=(width, height))


def from_pil(picture: Image.Image, size: tuple[int, int] | None = None) -> Picture:
    """`size` as (width, height), where it does not follow from the picture's own."""
    rgb = ImageOps.exif_transpose(picture).convert("RGB")
    if size is None:
        height, width = resized(rgb.height, rgb.width)
    else:
        width, height = size
    if rgb.size != (width, height):
        gap = None if size is None else 2.0
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=gap)
    return from_array(np.asarray(rgb))


def from_array(pixels: Array) -> Picture:
    """uint8 [height, width, 3] in the size after the resize."""
    height, width = pixels.shape[:2]

    def write(out: Array) -> None:
        p, m = RULES.patch, RULES.merge
        rows, columns = height // (p * m), width // (p * m)
        blocks = pixels.reshape(rows, m, p, columns, m, p, 3)
        view = out.reshape(rows, columns, m, m, 3, p, p)
        view[...] = blocks.transpose(0, 3, 1, 4, 6, 2, 5)

    return Picture(height, width, write)


def spdl_ffmpeg(data: bytes) -> Picture:
    """SPDL's decoder of images: FFmpeg, the resize a filter of it."""
    import spdl.io

    *_, height, width = planned_size(data)
    resize = spdl.io.get_video_filter_desc(
        scale_width=width, scale_height=height, scale_algo="bicubic", pix_fmt="rgb24"
    )
    frames = spdl.io.decode_packets(spdl.io.demux_image(data), filter_desc=resize)
    return from_array(spdl.io.to_numpy(spdl.io.convert_frames(frames)))


def decoder_of(setup: Setup, best: Decode = pillow) -> Decode:
    """`best` is the peer's own, where everyone is at their best."""
    return ours(exact=True) if setup.column == "same" else best
