"""The bytes of a picture file -> its first picture, upright, in 8-bit RGB.

`decode` is the way in; each format has the fastest decoder that gives Pillow's pixels, and Pillow
decides whatever that one refuses.
"""

from dataservice.pipeline.decoding.decode import decode, decode_whole
from dataservice.pipeline.decoding.limits import DecodeLimits
from dataservice.pipeline.decoding.raster import Decoded

__all__ = [
    "DecodeLimits",
    "Decoded",
    "decode",
    "decode_whole",
]
