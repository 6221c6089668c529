"""URLs as they may be shown, without user names, passwords and signatures.

Invariants: what stands between "://" and the last "@" of the authority, and the value of every
query key that reads like a credential, becomes ***; the rest of the text stays as it is.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
_QUERY_VALUE = re.compile(
    r"(?<=[?&])([^=&\s]*(?:sig|token|secret|key|pass|pwd|credential|auth|policy|session)[^=&\s]*=)"
    r"[^&\s'\"<>]+",
    re.IGNORECASE,
)


def mask_urls(text: str) -> str:
    """`text` with the secrets of all URLs in it replaced by ***."""
    if "://" not in text:
        return text
    return _QUERY_VALUE.sub(r"\1***", _USER.sub("***", text))


def mask_parts(text: str, url: str) -> str:
    """`text` about `url` without the secrets of it, wherever they stand, and of any other URL."""
    users = [part for user in _USER.findall(url) for part in (user, *user.split(":", 1)[1:])]
    values = [match[0][len(match[1]) :] for match in _QUERY_VALUE.finditer(url)]
    for secret in sorted({*users, *values}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return mask_urls(text)
