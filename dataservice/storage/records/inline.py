"""Images that stand in the record itself, as data: URIs.

Invariants: base64 of an image/* type alone; no more than MAX_INLINE_BYTES are decoded; nothing of
the URI's content is in a message.
"""

from __future__ import annotations

import base64
import binascii

from dataservice.errors import ImageError
from dataservice.storage.records.values import quoted

MAX_INLINE_BYTES = 64 * 1024 * 1024
"""Of the image."""


def is_data_uri(name: str) -> bool:
    return name.startswith("data:")


def decode_data_uri(uri: str) -> bytes:
    """Raises ImageError with a reason for a person. RFC 2397."""
    head, comma, body = uri.partition(",")
    media, *options = head.removeprefix("data:").split(";")
    if not comma or not is_data_uri(head):
        raise ImageError("a data: URI without a comma before its content")
    if not media.strip().lower().startswith("image/"):
        raise ImageError(f"a data: URI of the type {quoted(media)}, not of an image")
    if "base64" not in (option.strip().lower() for option in options):
        raise ImageError("a data: URI that is not base64")
    if len(body) > (MAX_INLINE_BYTES + 2) // 3 * 4:
        raise ImageError(f"a data: URI of more than {MAX_INLINE_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"a data: URI whose base64 is damaged: {error}") from None
