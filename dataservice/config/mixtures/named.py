"""Mixtures that give each data set a name: InternVL's meta JSON, and Qwen's data_dict as JSON.

InternVL: name -> {root, annotation, repeat_time, length, ...}. `repeat_time` below 1 keeps that
leading share, above 1 repeats; one image without a placeholder goes in front, as in its reader.
Qwen: name -> {annotation_path, data_path}.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from dataservice.config.mixtures.parts import MixtureFile, Part, percent

_INTERNVL = ("root", "media_root", "annotation", "repeat_time", "length")
_INTERNVL_IDLE = ("data_augment", "max_dynamic_patch", "min_dynamic_patch", "max_num_frame")
_QWEN = ("annotation_path", "data_path")


def is_internvl(content: object) -> bool:
    return _entries_have(content, "annotation")


def is_qwen(content: object) -> bool:
    return _entries_have(content, "annotation_path")


def internvl_parts(file: MixtureFile) -> list[Part]:
    return [
        _internvl_part(file, name, file.mapping(entry, name))
        for name, entry in file.mapping(file.content, "").items()
    ]


def qwen_parts(file: MixtureFile) -> list[Part]:
    parts = []
    for name, value in file.mapping(file.content, "").items():
        entry = file.mapping(value, name)
        file.keys(entry, name, _QWEN, ())
        parts.append(
            Part(
                name=name,
                records=file.path(file.text(entry, "annotation_path", name), name),
                images=_folder(file, entry, "data_path", name),
            )
        )
    return parts


def _internvl_part(file: MixtureFile, name: str, entry: dict[str, Any]) -> Part:
    file.keys(entry, name, _INTERNVL, _INTERNVL_IDLE)
    times = file.number(entry, "repeat_time", name) or Fraction(1)
    samples = file.number(entry, "length", name)
    root = "root" if "root" in entry else "media_root"
    return Part(
        name=name,
        records=file.path(file.text(entry, "annotation", name), f"{name}.annotation"),
        images=_folder(file, entry, root, name),
        take=f"first:{percent(times)}" if times < 1 else "all",
        repeat=max(times, Fraction(1)),
        weight=None if samples is None else samples * times,
        mismatch="front",
    )


def _folder(file: MixtureFile, entry: dict[str, Any], key: str, name: str) -> tuple[str, ...]:
    if entry.get(key) in (None, ""):
        return ()
    return (file.path(file.text(entry, key, name), f"{name}.{key}"),)


def _entries_have(content: object, key: str) -> bool:
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(entry, dict) for entry in content.values())
        and any(key in entry for entry in content.values())
    )
