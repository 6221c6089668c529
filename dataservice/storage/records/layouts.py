"""The record layouts: the fields of one record -> its turns and the images that they name.

Invariants: a field that is not read here is never looked at; what is wrong is said with the field's
name as it stands in the record; `key in fields` and values alone decide, never their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dataservice.errors import RecordError
from dataservice.storage.records.fields import FieldNames, Fields, Names
from dataservice.storage.records.model import Role
from dataservice.storage.records.values import kind, quoted

MAX_NAME = 4096
"""Characters of an image's name; a data: URI may be longer."""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """An image given in its place; None takes the next of those that the record lists."""

    name: str | None


Content = str | list[str | Slot]


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A record before the images are put in their places."""

    turns: list[tuple[Role, Content]]
    listed: list[str]
    """Images that the record names beside the text."""
    front: bool = False
    """Without a placeholder, the listed images stand in front."""
    literal: bool = False
    """The layout itself says where images stand; its text holds no placeholders."""
    keyed: bool = False
    """The listed image is called by the record's key; its suffix may be another."""


_MISSING = object()
_LONGEST_ERROR = 120
_RECOGNISED = (
    ("conversations", "llava"),
    ("messages", "messages"),
    ("texts", "finevision"),
    ("text_list", "mmc4"),
    ("caption", "caption"),
    ("text", "text"),
)
_UNSUPPORTED = ("video", "videos", "audio", "audios")
_PAIR_ROLES: tuple[Role, ...] = ("user", "assistant")
_PARTS_UNSUPPORTED = ("video", "audio")


class LayoutReader:
    """Reads the records of one source; `layout` "auto" tells them apart by content."""

    def __init__(self, names: Names, *, layout: str, data_uris: bool) -> None:
        self._layout = layout
        self._data_uris = data_uris
        self._top, self._turn = names.top, names.turn
        self._turn_names = tuple(names.turn.values())
        self._recognised = [(names.top[field], layout) for field, layout in _RECOGNISED]
        self._pair, self._info, self._roles = names.pair, names.info, names.roles
        self._unsupported = {names.top[field]: field.removesuffix("s") for field in _UNSUPPORTED}
        self._unsupported_names = frozenset(self._unsupported)
        self._image_fields = tuple(
            name for field in ("image", "images") if (name := names.top[field]) is not None
        )
        self._readers: dict[str, Callable[[Fields], Draft]] = {
            "llava": self._read_llava,
            "messages": self._read_messages,
            "text": self._read_text,
            "obelics": self._read_obelics,
            "mmc4": self._read_mmc4,
            "finevision": self._read_finevision,
            "caption": self._read_caption,
        }

    def read(self, fields: Fields) -> tuple[str, Draft]:
        """The layout and what it says; raises RecordError."""
        if not self._unsupported_names.isdisjoint(fields):
            for name, medium in self._unsupported.items():
                if fields.get(name):
                    raise RecordError(f"field '{name}': {medium} is not supported")
        layout = self._layout
        if layout == "auto":
            layout = self._recognise(fields)
        return layout, self._readers[layout](fields)

    def _recognise(self, fields: Fields) -> str:
        for name, layout in self._recognised:
            if name in fields:
                if layout == "finevision":
                    texts = fields[name]
                    pairs = isinstance(texts, list) and any(isinstance(t, dict) for t in texts)
                    return "finevision" if pairs else "obelics"
                return layout
        if self._has_failed(fields) and self._top["key"] in fields:
            return "caption"  # img2dataset leaves out a caption that it was not given
        known = ", ".join(f"'{self._top[field] or field}'" for field, _ in _RECOGNISED)
        raise RecordError(f"unknown layout: none of the fields {known}")

    # ---- layouts

    def _read_llava(self, fields: Fields) -> Draft:
        turns = self._turns(fields, "conversations", ("from", "value"))
        return Draft(turns, self._listed(fields))

    def _read_messages(self, fields: Fields) -> Draft:
        return Draft(self._turns(fields, "messages", ("role", "content")), self._listed(fields))

    def _read_text(self, fields: Fields) -> Draft:
        return Draft([("text", self._string(fields, self._top, "text"))], self._listed(fields))

    def _read_caption(self, fields: Fields) -> Draft:
        """Also img2dataset's: its images are called by key, and have a status."""
        if self._has_failed(fields):
            said = fields.get(self._top["error_message"])
            because = f": {quoted(said, _LONGEST_ERROR)}" if isinstance(said, str) and said else ""
            name = self._top["status"]
            raise RecordError(
                f"field '{name}' is {quoted(fields[name])}, the image was not fetched{because}"
            )
        caption = self._string(fields, self._top, "caption")
        listed = self._listed(fields)
        keyed = not listed and not fields.get(self._top["image_name"])
        return Draft([("text", caption)], listed or self._named(fields), front=True, keyed=keyed)

    def _has_failed(self, fields: Fields) -> bool:
        """As img2dataset says of a record whose image it could not get."""
        status = fields.get(self._top["status"])
        return isinstance(status, str) and status != "success"

    def _read_finevision(self, fields: Fields) -> Draft:
        turns: list[tuple[Role, Content]] = []
        for number, pair in enumerate(self._list(fields, "texts", "turns")):
            where = f"{self._top['texts']}[{number}]"
            if not isinstance(pair, dict):
                raise RecordError(f"field '{where}' must be an object, not {kind(pair)}")
            for role in _PAIR_ROLES:
                turns.append((role, self._string(pair, self._pair, role, where)))
        return Draft(turns, self._listed(fields), front=True)

    def _read_obelics(self, fields: Fields) -> Draft:
        """Neighbouring texts are paragraphs."""
        texts_name, images_name = self._top["texts"], self._top["images"]
        texts = self._list(fields, "texts", "texts")
        images = self._list(fields, "images", "images")
        if len(texts) != len(images):
            raise RecordError(
                f"fields '{texts_name}' and '{images_name}' must be equally long, "
                f"not {len(texts)} and {len(images)}"
            )
        content: list[str | Slot] = []
        for i, (text, image) in enumerate(zip(texts, images, strict=True)):
            if (text is None) == (image is None):
                said = "both are" if text is None else "neither is"
                raise RecordError(
                    f"one of '{texts_name}[{i}]' and '{images_name}[{i}]' must be null, {said}"
                )
            if image is not None:
                content.append(Slot(self._image_name(image, f"{images_name}[{i}]")))
            elif not isinstance(text, str):
                raise RecordError(
                    f"field '{texts_name}[{i}]' must be a string or null, not {kind(text)}"
                )
            else:
                after_text = content and isinstance(content[-1], str)
                content.append(f"\n\n{text}" if after_text else text)
        return Draft([("text", content)], [], literal=True)

    def _read_mmc4(self, fields: Fields) -> Draft:
        """An image stands before the sentence it points at; sentences are joined by a space."""
        sentences = self._list(fields, "text_list", "sentences")
        for number, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                where = f"{self._top['text_list']}[{number}]"
                raise RecordError(f"field '{where}' must be a string, not {kind(sentence)}")
        before: dict[int, list[Slot]] = {}
        infos = fields.get(self._top["image_info"])
        if infos is not None and not isinstance(infos, list):
            raise RecordError(
                f"field '{self._top['image_info']}' must be a list, not {kind(infos)}"
            )
        for number, info in enumerate(infos or ()):
            index, slot = self._mmc4_image(
                info, f"{self._top['image_info']}[{number}]", len(sentences)
            )
            before.setdefault(index, []).append(slot)
        content: list[str | Slot] = []
        for number, sentence in enumerate(sentences):
            content += before.get(number, ())
            after_text = content and isinstance(content[-1], str)
            content.append(f" {sentence}" if after_text else sentence)
        return Draft([("text", content)], [], literal=True)

    def _mmc4_image(self, info: Any, where: str, num_sentences: int) -> tuple[int, Slot]:
        if not isinstance(info, dict):
            raise RecordError(f"field '{where}' must be an object, not {kind(info)}")
        name = self._image_name(
            _get(info, self._info, "image_name", where), f"{where}.{self._info['image_name']}"
        )
        index = _get(info, self._info, "matched_text_index", where)
        if type(index) is not int or not 0 <= index < num_sentences:
            said = index if type(index) is int and abs(index) < 10**9 else kind(index)
            raise RecordError(
                f"field '{where}.{self._info['matched_text_index']}' must be the number of a "
                f"sentence from 0 to {num_sentences - 1}, not {said}"
            )
        return index, Slot(name)

    # ---- their parts

    def _turns(
        self, fields: Fields, field: str, spelling: tuple[str, str]
    ) -> list[tuple[Role, Content]]:
        """Turns are spelled from/value or role/content, whatever the list of them is called."""
        items = self._list(fields, field, "turns")
        roles = self._roles
        sender, value, role_name, content_name = self._turn_names
        turns: list[tuple[Role, Content]] = []
        for item in items:
            if type(item) is dict:
                content = item[value] if value in item else item.get(content_name)
                said = item[sender] if sender in item else item.get(role_name)
                role = roles.get(said) if type(said) is str else None
                if role is not None and type(content) is str:
                    turns.append((role, content))
                    continue
            turns.append(self._odd_turn(item, f"{self._top[field]}[{len(turns)}]", spelling))
        return turns

    def _odd_turn(self, turn: Any, where: str, spelling: tuple[str, str]) -> tuple[Role, Content]:
        """One whose content is no string, or that is wrong."""
        if not isinstance(turn, dict):
            raise RecordError(f"field '{where}' must be an object, not {kind(turn)}")
        sender, value, role_name, content_name = self._turn_names
        content = turn.get(value, turn.get(content_name, _MISSING))
        said = turn.get(sender, turn.get(role_name, _MISSING))
        content = self._content(turn, content, where, spelling[1])
        role = self._roles.get(said) if isinstance(said, str) else None
        if role is None:
            raise self._wrong_role(turn, said, where, spelling[0])
        return role, content

    def _content(self, turn: Fields, content: Any, where: str, spelled: str) -> Content:
        if content is _MISSING:
            raise RecordError(f"field '{where}.{self._turn[spelled] or spelled}' is missing")
        if isinstance(content, str):
            return content
        name = self._turn["value"] if self._turn["value"] in turn else self._turn["content"]
        if not isinstance(content, list):
            raise RecordError(
                f"field '{where}.{name}' must be a string or a list, not {kind(content)}"
            )
        parts: list[str | Slot] = []
        for number, part in enumerate(content):
            text = part.get("text") if type(part) is dict and part.get("type") == "text" else None
            if type(text) is str:
                parts.append(text)
            else:
                parts.append(self._part(part, f"{where}.{name}[{number}]"))
        return parts

    def _wrong_role(self, turn: Fields, role: Any, where: str, spelled: str) -> RecordError:
        if role is _MISSING:
            return RecordError(f"field '{where}.{self._turn[spelled] or spelled}' is missing")
        name = self._turn["from"] if self._turn["from"] in turn else self._turn["role"]
        said = quoted(role) if isinstance(role, str) else kind(role)
        return RecordError(
            f"field '{where}.{name}' must be one of {', '.join(self._roles)}, not {said}"
        )

    def _part(self, part: Any, where: str) -> str | Slot:
        if not isinstance(part, dict):
            raise RecordError(f"field '{where}' must be an object, not {kind(part)}")
        what = part.get("type")
        if what == "text":
            text = part.get("text", _MISSING)
            if not isinstance(text, str):
                wrong = "is missing" if text is _MISSING else f"must be a string, not {kind(text)}"
                raise RecordError(f"field '{where}.text' {wrong}")
            return text
        if what == "image":
            for field in ("image", "path", "url"):
                if (name := part.get(field)) is not None:
                    return Slot(self._image_name(name, f"{where}.{field}"))
            return Slot(None)
        if what == "image_url":
            url = part.get("image_url")
            name = url.get("url") if isinstance(url, dict) else url
            return Slot(self._image_name(name, f"{where}.image_url.url"))
        if isinstance(what, str) and (medium := next(filter(what.count, _PARTS_UNSUPPORTED), "")):
            raise RecordError(f"field '{where}': {medium} is not supported")
        said = quoted(what) if isinstance(what, str) else kind(what)
        raise RecordError(f"field '{where}.type' must be text, image or image_url, not {said}")

    def _listed(self, fields: Fields) -> list[str]:
        found: list[str] = []
        for field in self._image_fields:
            value = fields.get(field)
            if value is None or value == "":
                continue
            if found and value:
                both = " and ".join(f"'{name}'" for name in self._image_fields)
                raise RecordError(f"both fields {both} name images; keep one")
            if _is_name(value):
                found.append(value)
            elif isinstance(value, (str, dict)):
                found.append(self._image_name(value, field))
            elif isinstance(value, list):
                for number, name in enumerate(value):
                    if not _is_name(name):
                        name = self._image_name(name, f"{field}[{number}]")
                    found.append(name)
            else:
                raise RecordError(f"field '{field}' must be a string or a list, not {kind(value)}")
        return found

    def _named(self, fields: Fields) -> list[str]:
        """The image of a caption by the names that tools give it."""
        name = self._top["image_name"]
        if fields.get(name):
            return [self._image_name(fields[name], f"{name}")]
        key = fields.get(self._top["key"])
        if isinstance(key, str) and key:
            return [self._image_name(f"{key}.jpg", f"{self._top['key']}")]
        known = ", ".join(
            f"'{self._top[field] or field}'" for field in ("image", "image_name", "key")
        )
        raise RecordError(f"a caption without an image: none of the fields {known}")

    def _image_name(self, value: Any, where: str) -> str:
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            value = value["path"]
        if not isinstance(value, str) or not value:
            wrong = "an empty string" if value == "" else kind(value)
            raise RecordError(f"field '{where}' must be a file name, not {wrong}")
        if value.startswith("data:"):
            if not self._data_uris:
                raise RecordError(
                    f"field '{where}' holds the image itself, a data: URI; "
                    "set data_uris: true for the source to use it"
                )
        elif len(value) > MAX_NAME:
            raise RecordError(
                f"field '{where}' must be a file name, not {len(value)} characters"
                f" (more than {MAX_NAME})"
            )
        return value

    def _list(self, fields: Fields, field: str, of: str) -> Sequence[Any]:
        value = fields.get(self._top[field])
        if not isinstance(value, list):
            value = _get(fields, self._top, field)
            raise RecordError(
                f"field '{self._top[field]}' must be a list of {of}, not {kind(value)}"
            )
        if not value:
            raise RecordError(f"field '{self._top[field]}' must hold {of}, but is empty")
        return value

    @staticmethod
    def _string(fields: Fields, names: FieldNames, field: str, where: str = "") -> str:
        value = fields.get(names[field])
        if type(value) is not str:
            value = _get(fields, names, field, where)
            dot = "." if where else ""
            raise RecordError(
                f"field '{where}{dot}{names[field]}' must be a string, not {kind(value)}"
            )
        return value


def _is_name(value: Any) -> bool:
    """Of an image, in the way that needs no further look."""
    return type(value) is str and 0 < len(value) <= MAX_NAME and value[:5] != "data:"


def _get(fields: Fields, names: FieldNames, field: str, where: str = "") -> Any:
    name = names[field]
    if name not in fields:
        raise RecordError(f"field '{where}{'.' if where else ''}{name or field}' is missing")
    return fields[name]
