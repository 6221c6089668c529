"""Reads a Jinja chat template where its users have it: in a tokenizer's folder, or a file.

Invariants: what is read is the template and the names of special tokens, nothing else of the
folder; what is missing, too large or none is a ConfigError that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataservice.errors import ConfigError

_MAX_BYTES = 16 << 20
"""Of a file; the largest tokenizer_config.json in use have about a megabyte."""
_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_FILE = "tokenizer_config.json"
_TEMPLATE_KEY = "chat_template"
_JSON_FILES = ("chat_template.json", _TOKENIZER_FILE)
"""A processor's comes before its tokenizer's."""
_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFile:
    path: str
    """As it was asked for."""
    source: str
    variables: Mapping[str, str]
    """Names of special tokens, as the template sees them: bos_token and the like."""

    @property
    def fingerprint(self) -> str:
        """Of the content, not the place."""
        text = json.dumps([self.source, dict(self.variables)], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def read_template(path: str) -> TemplateFile:
    """`path`: a `.jinja` file, or a folder that has chat_template.jinja, chat_template.json or
    tokenizer_config.json. Special tokens are those of the tokenizer_config.json beside it.

    Raises ConfigError.
    """
    is_folder = os.path.isdir(path)
    folder = path if is_folder else os.path.dirname(path)
    config = _json(os.path.join(folder, _TOKENIZER_FILE))
    return TemplateFile(
        path=path,
        source=_in_folder(path) if is_folder else _text(path),
        variables={
            key: name for key in _TOKEN_KEYS if (name := _token_name(config.get(key))) is not None
        },
    )


def _in_folder(folder: str) -> str:
    file = os.path.join(folder, _TEMPLATE_FILE)
    if os.path.exists(file):
        return _text(file)
    for name in _JSON_FILES:
        file = os.path.join(folder, name)
        found = _json(file).get(_TEMPLATE_KEY)
        if isinstance(found, list):  # several by name
            named = [each for each in found if isinstance(each, dict)]
            by_name = {each.get("name"): each.get("template") for each in named}
            found = by_name.get("default")
            if found is None:
                raise ConfigError(
                    f"tokenizer.template: {file!r} has several chat templates and none is called "
                    "'default'; save the one that you want as a .jinja file and name that"
                )
        if isinstance(found, str):
            return found
        if found is not None:
            raise ConfigError(f"tokenizer.template: {_TEMPLATE_KEY} in {file!r} is not a text")
    raise ConfigError(
        f"tokenizer.template: the folder {folder!r} has no chat template: neither "
        f"{_TEMPLATE_FILE} nor {_TEMPLATE_KEY} in {' or '.join(_JSON_FILES)}"
    )


def _json(file: str) -> dict[str, Any]:
    """Nothing where there is no such file."""
    if not os.path.exists(file):
        return {}
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"tokenizer.template: {file!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"tokenizer.template: {file!r} is not a JSON object")
    return found


def _text(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"tokenizer.template: {file!r} cannot be read: {error.strerror}"
        ) from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"tokenizer.template: {file!r} is larger than {_MAX_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"tokenizer.template: {file!r} is not UTF-8: {error}") from error


def _token_name(value: object) -> str | None:
    """Written as a text or as an object with its properties."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
