"""What Pillow says of a bad picture, in words for people.

Invariants: the same words each time, without addresses of objects; never empty.
"""

from __future__ import annotations

import re
import struct

_OBJECT = re.compile(r" ?<[^>]* object at 0x[0-9a-f]+>")
_LACKING = re.compile("not (available|installed)")
_UNKNOWN_HEADER = "its header cannot be read"
_HEADER_SAYINGS = ("cannot identify image file", "not identified by this driver")


def in_words(error: Exception) -> str:
    """Begins with "unsupported: " where this build of Pillow lacks what reads the picture."""
    if isinstance(error, SyntaxError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Pillow's own wrapping
    said = error.args[0] if error.args and isinstance(error.args[0], bytes) else None
    text = said.decode("latin-1") if said is not None else _OBJECT.sub("", str(error))
    if text.startswith(_HEADER_SAYINGS):
        return _UNKNOWN_HEADER
    if isinstance(error, struct.error):
        return f"{_UNKNOWN_HEADER}: it is cut off"
    if isinstance(error, KeyError):
        return f"{_UNKNOWN_HEADER}: a field or value {text} is missing or unknown"
    if _LACKING.search(text):
        return f"unsupported: {text}"
    if re.fullmatch(r"decoder error -?[0-9]+", text):
        return "its data cannot be decoded"
    return text or f"it cannot be decoded ({type(error).__name__})"
