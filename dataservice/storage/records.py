"""One JSONL line -> turns of text and the names of the images that stand in them.

Invariants: the same bytes give the same `Record` or the same `RecordError` in every process (the
index and the workers both call `parse_record`); a turn's text is the source's text, with the
placeholder where an image stands, and there are as many placeholders as images; of a key given
twice the last counts; a lone surrogate escape becomes U+FFFD; no input recurses or crashes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from dataservice.errors import RecordError

Role = Literal["system", "user", "assistant", "tool", "text"]

LAYOUTS = ("llava", "messages", "text")
"""Names of the record layouts; the position is the code in the index."""

MAX_IMAGES = 65_535
"""Images a record may have."""

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
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    role: Role
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    layout: str
    """One of `LAYOUTS`."""
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    """Names as written, in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class _Inline:
    """An image given as a part of a message; None takes the next of the record's `images`."""

    name: str | None


_Content = str | list[str | _Inline]


def parse_record(line: bytes, *, layout: str = "auto", placeholder: str = "<image>") -> Record:
    """Read one line (without its line end). Raises RecordError with a reason for a person."""
    fields = _load(line)
    if not isinstance(fields, dict):
        raise RecordError(f"a record must be a JSON object, not {_kind(fields)}")
    if layout == "auto":
        layout = _recognise(fields)
    try:
        read = _READERS[layout]
    except KeyError:
        known = ", ".join(LAYOUTS)
        raise RecordError(f"unknown layout {layout!r}; known are auto, {known}") from None
    turns, images = _place(read(fields), _listed_images(fields), placeholder)
    if len(images) > MAX_IMAGES:
        raise RecordError(f"{len(images)} images, more than {MAX_IMAGES}")
    return Record(layout=layout, turns=turns, images=images)


def _load(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        first = error
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        raise RecordError(f"invalid UTF-8 at byte {bad.start} of the line") from None
    repaired = _ESCAPE.sub(lambda m: rb"\ufffd" if m["lone"] else m[0], line)
    if repaired != line:
        try:
            return orjson.loads(repaired)
        except orjson.JSONDecodeError as error:
            first = error
    if "depth" in first.msg:
        raise RecordError("nested too deep (more than 1,024 levels)") from None
    raise RecordError(f"not valid JSON at character {first.pos}: {first.msg}") from None


def _recognise(fields: dict[str, Any]) -> str:
    for field, layout in (("conversations", "llava"), ("messages", "messages"), ("text", "text")):
        if field in fields:
            return layout
    raise RecordError("none of the fields 'conversations', 'messages' and 'text'")


def _listed_images(fields: dict[str, Any]) -> list[str]:
    named: list[str] = []
    for field in ("image", "images"):
        value = fields.get(field)
        if value is None or value == "":
            continue
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            raise RecordError(f"field '{field}' must be a string or a list, not {_kind(value)}")
        for number, name in enumerate(names):
            if not isinstance(name, str) or not name:
                wrong = "an empty string" if name == "" else _kind(name)
                raise RecordError(f"field '{field}[{number}]' must be a file name, not {wrong}")
        if named and names:
            raise RecordError("both fields 'image' and 'images' name images; keep one")
        named += names
    return named


def _read_llava(fields: dict[str, Any]) -> list[tuple[Role, _Content]]:
    turns: list[tuple[Role, _Content]] = []
    for where, turn in _objects(fields, "conversations"):
        value = _get(turn, where, "value")
        if not isinstance(value, str):
            raise RecordError(f"field '{where}.value' must be a string, not {_kind(value)}")
        turns.append((_role(turn, where, "from"), value))
    return turns


def _read_messages(fields: dict[str, Any]) -> list[tuple[Role, _Content]]:
    turns: list[tuple[Role, _Content]] = []
    for where, turn in _objects(fields, "messages"):
        content = _get(turn, where, "content")
        if isinstance(content, list):
            content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        elif not isinstance(content, str):
            raise RecordError(
                f"field '{where}.content' must be a string or a list, not {_kind(content)}"
            )
        turns.append((_role(turn, where, "role"), cast(_Content, content)))
    return turns


def _read_text(fields: dict[str, Any]) -> list[tuple[Role, _Content]]:
    text = fields.get("text")
    if not isinstance(text, str):
        raise RecordError(f"field 'text' must be a string, not {_kind(text)}")
    return [("text", text)]


_READERS: dict[str, Callable[[dict[str, Any]], list[tuple[Role, _Content]]]] = {
    "llava": _read_llava,
    "messages": _read_messages,
    "text": _read_text,
}


def _objects(fields: dict[str, Any], field: str) -> list[tuple[str, dict[str, Any]]]:
    items = _get(fields, "", field)
    if not isinstance(items, list):
        raise RecordError(f"field '{field}' must be a list of turns, not {_kind(items)}")
    if not items:
        raise RecordError(f"field '{field}' must hold a turn, but is empty")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise RecordError(f"field '{field}[{number}]' must be an object, not {_kind(item)}")
    return [(f"{field}[{number}]", item) for number, item in enumerate(items)]


def _role(turn: dict[str, Any], where: str, field: str) -> Role:
    value = _get(turn, where, field)
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        said = repr(value[:40]) if isinstance(value, str) else _kind(value)
        raise RecordError(f"field '{where}.{field}' must be one of {', '.join(_ROLES)}, not {said}")
    return role


def _part(part: Any, where: str) -> str | _Inline:
    if not isinstance(part, dict):
        raise RecordError(f"field '{where}' must be an object, not {_kind(part)}")
    kind = part.get("type")
    if kind == "text":
        text = _get(part, where, "text")
        if not isinstance(text, str):
            raise RecordError(f"field '{where}.text' must be a string, not {_kind(text)}")
        return text
    if kind == "image":
        name = part.get("image")
    elif kind == "image_url":
        url = _get(part, where, "image_url")
        name = url.get("url") if isinstance(url, dict) else url
        if name is None:
            raise RecordError(f"field '{where}.image_url.url' is missing")
    else:
        said = repr(kind[:40]) if isinstance(kind, str) else _kind(kind)
        raise RecordError(f"field '{where}.type' must be text, image or image_url, not {said}")
    if name is not None and (not isinstance(name, str) or not name):
        raise RecordError(f"the image of field '{where}' must be a file name, not {_kind(name)}")
    return _Inline(name)


def _place(
    contents: Sequence[tuple[Role, _Content]], listed: list[str], placeholder: str
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """Put a placeholder where each image stands and the images' names in that order."""
    wanted: list[str | None] = []
    turns: list[Turn] = []
    for role, content in contents:
        if isinstance(content, str):
            wanted += [None] * content.count(placeholder)
            turns.append(Turn(role=role, text=content))
            continue
        pieces: list[str] = []
        for part in content:
            if isinstance(part, _Inline):
                wanted.append(part.name)
                pieces.append(placeholder)
            else:
                wanted += [None] * part.count(placeholder)
                pieces.append(part)
        text = "".join(pieces)
        turns.append(Turn(role=role, text=text))
    places = wanted.count(None)
    if places != len(listed):
        raise RecordError(
            f"{_count(places, 'placeholder')} {placeholder!r}, {_count(len(listed), 'image')}"
        )
    if sum(turn.text.count(placeholder) for turn in turns) != len(wanted):
        raise RecordError(f"parts of a turn join to a further placeholder {placeholder!r}")
    names = iter(listed)
    return tuple(turns), tuple(name if name is not None else next(names) for name in wanted)


def _get(fields: dict[str, Any], where: str, field: str) -> Any:
    if field not in fields:
        raise RecordError(f"field '{where}{'.' if where else ''}{field}' is missing")
    return fields[field]


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
