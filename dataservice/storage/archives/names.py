"""What a record calls an image, turned into the name that archives and folders are searched for.

Invariants: a name that is absolute, a URL or leaves its root is refused; "./" and empty parts never
decide whether an image is found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dataservice.errors import RecordError
from dataservice.storage.membertable import is_safe_name

_SHOWN = 200
_SPECIAL = ("\\", ":", "\0", "..", ".\n", "\n\n")
"""Of these one is in lines of parts of names where a name may not be what is searched for."""
_IN_ARCHIVE = re.compile(r"(.*?\.(?:zip|tar))@?/+(.+)", re.IGNORECASE | re.DOTALL)


def shown(name: str) -> str:
    """In quotes, cut where it is long."""
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "...")


def searched_name(name: str, strip_prefix: str = "", add_prefix: str = "") -> str:
    """The name as archives are searched for it: `strip_prefix` taken off where the name starts with
    it, `add_prefix` put in front. Raises RecordError for one that is refused."""
    if "://" in name or name.startswith("data:"):
        raise RecordError(f"image {shown(name[:60])} is a URL; only image roots are read")
    whole = add_prefix + name.removeprefix(strip_prefix)
    if not is_safe_name(whole):
        remedy = "; strip_prefix makes names relative, such as / with images: [/]"
        raise RecordError(
            f"image {shown(name)} is absolute or leaves its root; it is not read"
            f"{remedy if whole.startswith('/') else ''}"
        )
    plain = plain_name(whole)
    if not plain:
        raise RecordError(f"image {shown(name)} names no file")
    return plain


def searched_names(
    names: Sequence[str], strip_prefix: str = "", add_prefix: str = ""
) -> list[str | RecordError]:
    """`searched_name` of each, or its error."""
    if not strip_prefix and not add_prefix and _are_plain(names):
        return list(names)
    found: list[str | RecordError] = []
    for name in names:
        try:
            found.append(searched_name(name, strip_prefix, add_prefix))
        except RecordError as error:
            found.append(error)
    return found


def plain_name(name: str) -> str:
    """Without "." and empty parts."""
    if "./" not in name and "//" not in name and not name.endswith((".", "/")):
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def plain_names(names: list[str]) -> list[str]:
    """`plain_name` of each."""
    return names if _are_plain(names) else [plain_name(name) for name in names]


def in_archive(name: str) -> tuple[str, str] | None:
    """(archive, member) of a name such as "x.zip@/a/b.jpg" or "x.zip/a/b.jpg"; None for others."""
    found = _IN_ARCHIVE.fullmatch(name)
    return (found[1], plain_name(found[2])) if found else None


def is_archive(url: str, name: str) -> bool:
    """Whether the archive at `url` is what a record calls `name`: the end of its path."""
    return f"/{url}".endswith(f"/{name}")


def _are_plain(names: Sequence[str]) -> bool:
    lines = "\n".join(("", *names, "")).replace("/", "\n")
    return not any(part in lines for part in _SPECIAL)
