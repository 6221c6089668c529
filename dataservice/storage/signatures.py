"""What a file is by its first bytes, whatever its name says.

Invariants: pure functions of at most the first 1,024 bytes; a format's name is Pillow's. A reason
for a file that is no picture begins with "empty", "unsupported format" or "not an image".
"""

from __future__ import annotations

HEAD_BYTES = 1024
"""What the functions here look at, at most."""

_PICTURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)
_UNSUPPORTED = (
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\2\0", "CUR"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"v/1\x01", "OpenEXR"),
    (b"qoif", "QOI"),
    (b"DDS ", "DDS"),
    (b"\x1aE\xdf\xa3", "Matroska video"),
    (b"wOFF", "font"),
    (b"PK\x03\x04", "zip archive"),
    (b"\x1f\x8b", "gzip"),
)
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
}
_VIDEO = "MP4 or another video"
_CONTAINERS = {
    "zip": "a zip archive",
    "gz": "gzip data",
    "zst": "zstandard data",
    "tar": "a tar archive",
    "parquet": "a Parquet file",
}
_BMP_HEADERS = frozenset((12, 16, 40, 52, 56, 64, 108, 124))
"""Their lengths, which tell a BMP from a text that begins with "BM"."""
_NETPBM = frozenset(b"123456")


def picture_format(head: bytes) -> str | None:
    """Of a picture in a format that may be read; None for anything else."""
    for signature, name in _PICTURES:
        if head.startswith(signature):
            return name
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith(b"BM") and (
        len(head) < 18 or int.from_bytes(head[14:18], "little") in _BMP_HEADERS
    ):
        return "BMP"
    if head[:1] == b"P" and len(head) > 2 and head[1] in _NETPBM and head[2:3].isspace():
        return "PPM"
    if head[4:8] == b"ftyp" and _BRANDS.get(head[8:12]) == "AVIF":
        return "AVIF"
    return None


def container_format(head: bytes) -> str | None:
    """ "zip", "gz", "zst", "tar" or "parquet"; None for anything else."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x07\x08")):
        return "zip"
    if head.startswith(b"\x1f\x8b"):
        return "gz"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (
        head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    ):
        return "zst"
    if head[257:262] == b"ustar":
        return "tar"
    return "parquet" if head.startswith(b"PAR1") else None


def described(head: bytes) -> str | None:
    """What a file of a known format other than text is, for a person, such as "a tar archive"."""
    if container := container_format(head):
        return _CONTAINERS[container]
    picture = picture_format(head)
    if picture:
        return f"a {picture} picture"
    for signature, name in _UNSUPPORTED:
        if head.startswith(signature):
            return f"a file of the format {name}"
    if head[4:8] == b"ftyp":
        return f"a file of the format {_BRANDS.get(head[8:12], _VIDEO)}"
    return "an HTML page" if _is_page(_text(head)) else None


def why_no_picture(head: bytes) -> str:
    """The reason, for a person, of bytes that `picture_format` does not know."""
    if not head:
        return "empty: the file has no bytes"
    for signature, name in _UNSUPPORTED:
        if head.startswith(signature):
            return f"unsupported format: {name}"
    if head[4:8] == b"ftyp":
        return f"unsupported format: {_BRANDS.get(head[8:12], _VIDEO)}"
    if head.startswith(b"RIFF"):
        return f"unsupported format: RIFF {head[8:12].decode('ascii', 'replace').strip()}"
    text = _text(head)
    if text.startswith(b"<"):
        if b"<svg" in text:
            return "unsupported format: SVG"
        return f"not an image: {'an HTML page' if _is_page(text) else 'an XML text'}"
    return f"not an image in a known format (first bytes: {head[:8].hex(' ')})"


def _text(head: bytes) -> bytes:
    """In lower case, without what may stand in front."""
    return head[:HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()


def _is_page(text: bytes) -> bool:
    return text.startswith(b"<") and (
        text.startswith(b"<!doctype html") or b"<html" in text or b"<body" in text
    )
