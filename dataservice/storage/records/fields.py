"""The names that a layout's fields and roles have in the records of a source.

Invariants: a field that the source renames is known by its new name alone; a name that one field
took over is no longer any other's; what the settings say wrongly is a ConfigError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from dataservice.errors import ConfigError
from dataservice.storage.records.model import LAYOUTS, Role
from dataservice.storage.sources import RecordFormat

Fields = dict[Any, Any]
"""A JSON object; its keys are strings, and asking it for the key None finds nothing."""
FieldNames = dict[str, str | None]
"""What the records call a layout's fields; None for a field that they cannot have."""

TOP_FIELDS = (
    "conversations",
    "messages",
    "texts",
    "text_list",
    "image_info",
    "caption",
    "text",
    "image",
    "images",
    "image_name",
    "key",
    "status",
    "error_message",
    "width",
    "height",
    "width_list",
    "height_list",
    "video",
    "videos",
    "audio",
    "audios",
)
"""Of a record."""
TURN_FIELDS = ("from", "value", "role", "content")
PAIR_FIELDS = ("user", "assistant")
"""Of FineVision's turns."""
INFO_FIELDS = ("image_name", "matched_text_index")
"""Of MMC4's images."""
_LEVELS = (TOP_FIELDS, TURN_FIELDS, PAIR_FIELDS, INFO_FIELDS)

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class Names:
    """Of one source, by level; raises ConfigError for a format that says something unknown."""

    def __init__(self, fmt: RecordFormat) -> None:
        if fmt.layout != "auto" and fmt.layout not in LAYOUTS:
            known = ", ".join(LAYOUTS)
            raise ConfigError(f"layout: {fmt.layout!r} is unknown; known are auto, {known}")
        known_fields = {field for level in _LEVELS for field in level}
        renamed = dict(fmt.fields)
        for field in renamed:
            if field not in known_fields:
                known = ", ".join(sorted(known_fields))
                raise ConfigError(f"fields: no layout has a field {field!r}; known are {known}")
        self.top = _resolve(TOP_FIELDS, renamed)
        self.turn = _resolve(TURN_FIELDS, renamed)
        self.pair = _resolve(PAIR_FIELDS, renamed)
        self.info = _resolve(INFO_FIELDS, renamed)
        self.roles = dict(_ROLES)
        for role, meant in fmt.roles:
            if meant not in ("system", "user", "assistant", "tool"):
                raise ConfigError(
                    f"roles: {role!r} is {meant!r}; give system, user, assistant or tool"
                )
            self.roles[role] = cast(Role, meant)

    def schema(self) -> Any:
        """Of a record, for msgspec: what no layout reads is left out, and so skipped unread."""
        part: Any = _typed_dict("Part", {field: field for field in PART_FIELDS}, {})
        contents: dict[str, Any] = {"content": str | list[part] | None}
        turns: Any = list[_typed_dict("Turn", self.turn, contents)]  # type: ignore[misc]
        pair: Any = _typed_dict("Pair", self.pair, {})
        lists: dict[str, Any] = {
            "conversations": turns,
            "messages": turns,
            "texts": list[pair | str | None],
            "image_info": list[_typed_dict("Info", self.info, {})],  # type: ignore[misc]
        }
        return _typed_dict("Record", self.top, lists)


PART_FIELDS = ("type", "text", "image", "path", "url", "image_url")
"""Of a part of a message's content; not renamed."""


def placeholder_pattern(placeholders: tuple[str, ...]) -> tuple[re.Pattern[str], bool]:
    """With a group for each "{n}"; and whether there is any."""
    for text in placeholders:
        if not text:
            raise ConfigError("placeholder: is empty; give the text that stands for an image")
        if text.count("{n}") > 1:
            raise ConfigError(f"placeholder: {text!r} holds {{n}} more than once")
    longest_first = sorted(placeholders, key=len, reverse=True)
    parts = [re.escape(t).replace(re.escape("{n}"), "([0-9]+)") for t in longest_first]
    return re.compile("|".join(parts) or "(?!)"), any("{n}" in text for text in placeholders)


def _resolve(fields: tuple[str, ...], renamed: Mapping[str, str]) -> FieldNames:
    own = {field: renamed[field] for field in fields if field in renamed}
    for name in own.values():
        same = [field for field, other in own.items() if other == name]
        if len(same) > 1:
            raise ConfigError(f"fields: {' and '.join(same)} are both {name!r} in the records")
    taken = set(own.values())
    return {field: own.get(field, None if field in taken else field) for field in fields}


def _typed_dict(name: str, fields: Mapping[str, str | None], types: Mapping[str, Any]) -> Any:
    make: Any = TypedDict
    given = {theirs: types.get(ours, Any) for ours, theirs in fields.items() if theirs is not None}
    return make(name, given, total=False)
