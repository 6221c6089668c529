"""The upright size and the format of a picture from its headers, without decoding it."""

from dataservice.storage.probe.header import MAX_PIXELS, MAX_SIDE, ImageHeader, probe
from dataservice.storage.probe.parts import FIRST_READ_BYTES

__all__ = [
    "FIRST_READ_BYTES",
    "MAX_PIXELS",
    "MAX_SIDE",
    "ImageHeader",
    "probe",
]
