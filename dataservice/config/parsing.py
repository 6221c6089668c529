"""From a YAML text to the models of schema.py, or to errors for people.

Invariants: an unknown key, a wrong type or an undefined environment variable is a ConfigError
that names file, line, full key and remedy, all of them in one go; no text shows a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dataservice.config.mixtures import is_mixture
from dataservice.config.schema import ConfigFile
from dataservice.config.values import masked
from dataservice.errors import ConfigError

Key = tuple[str | int, ...]

_SHOWN_BITS = 1024
MAX_VALUES = 1_000_000
"""In a file, those that aliases repeat counted each time: a few lines of aliases make billions."""


def parse_config(text: str, *, name: str, base_dir: str) -> ConfigFile:
    """`name` is the file's for error texts; relative paths are below `base_dir`. ConfigError."""
    lines: dict[Key, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _collect_lines(root, (), lines)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not a YAML file: {error}") from error
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    except _TooManyValues:
        raise ConfigError(
            f"{name}: holds over {MAX_VALUES:,} values, those of aliases (*name) counted each time"
        ) from None
    except _DuplicateKey as error:
        raise ConfigError(f"{name}:{error.line}: {error.key}: this key stands here twice") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}: should be a mapping of settings, such as 'job: my-run'")
    if "job" not in data and is_mixture(data):
        raise ConfigError(
            f"{name}: is a mixture of data sets, not a config: put `mixture: {name}` into a config "
            "(`dataservice lint` takes it as it is)"
        )
    try:
        return ConfigFile.model_validate(data, context={"base_dir": base_dir})
    except ValidationError as error:
        raise described(error, name, lines) from None


def described(error: ValidationError, name: str, lines: Mapping[Key, int]) -> ConfigError:
    """For people; `lines` of the keys in the file `name`, as far as they are known."""
    return ConfigError("\n".join(_describe(detail, name, lines) for detail in error.errors()))


class _TooManyValues(Exception):
    pass


class _DuplicateKey(Exception):
    def __init__(self, key: str, line: int) -> None:
        self.key = key
        self.line = line
        super().__init__(key)


def _collect_lines(node: yaml.Node, key: Key, lines: dict[Key, int]) -> None:
    if len(lines) > MAX_VALUES:
        raise _TooManyValues
    if isinstance(node, yaml.MappingNode):
        for name_node, value in node.value:
            child = (*key, str(name_node.value))
            line = name_node.start_mark.line + 1
            if child in lines:
                raise _DuplicateKey(_dotted(child), line)
            lines[child] = line
            _collect_lines(value, child, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*key, i)] = value.start_mark.line + 1
            _collect_lines(value, (*key, i), lines)


def _dotted(key: Key) -> str:
    """("sources", 0, "records") as sources[0].records."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def _describe(detail: ErrorDetails, name: str, lines: Mapping[Key, int]) -> str:
    key: Key = detail["loc"]
    shown = key
    while shown and shown not in lines:
        shown = shown[:-1]
    where = f"{name}:{lines[shown]}" if shown else name
    label = f"{_dotted(key)}: " if key else ""
    return f"{where}: {label}{_problem(detail, key)}"


def _problem(detail: ErrorDetails, key: Key) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key)
    if detail["type"] == "missing":
        return "this key is required"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    if isinstance(detail["input"], dict | list | BaseModel):
        return message
    named = next((str(part) for part in reversed(key) if isinstance(part, str)), "")
    given = masked(named, detail["input"])
    huge = isinstance(given, int) and given.bit_length() > _SHOWN_BITS
    return f"{masked(named, message)}, got {'a number too long to show' if huge else repr(given)}"


def _unknown_key(key: Key) -> str:
    known = list(_known_keys(_model_at(key[:-1])))
    close = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"unknown key; did you mean {_dotted((*key[:-1], close[0]))}?"
    everywhere: dict[str, str] = {}
    for path, leaf in _all_keys(ConfigFile):
        everywhere.setdefault(leaf, path)
    elsewhere = difflib.get_close_matches(str(key[-1]), everywhere, n=1, cutoff=0.8)
    hint = f"did you mean {everywhere[elsewhere[0]]}? " if elsewhere else ""
    return f"unknown key; {hint}Known here: {', '.join(known)}"


def _known_keys(model: type[BaseModel] | None) -> Iterator[str]:
    yield from model.model_fields if model else ()


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `annotation`, be it the annotation itself or a list of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)


def _model_at(key: Key) -> type[BaseModel] | None:
    model: type[BaseModel] | None = ConfigFile
    for part in key:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = _section_of(field.annotation) if field else None
    return model


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield prefix + name, name
        if section := _section_of(field.annotation):
            yield from _all_keys(section, f"{prefix}{name}.")
