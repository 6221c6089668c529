"""Mixture files of other trainers, read as they are and turned into sources of ours.

Invariants: every part of the file becomes one source, in order, or the file is refused with the
reason; shares and repetitions stay exact.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from dataservice.config.mixtures import energon, named, onevision
from dataservice.config.mixtures.parts import MixtureFile, Part, read_file
from dataservice.errors import ConfigError

_FORMATS: tuple[tuple[Callable[[object], bool], Callable[[MixtureFile], list[Part]]], ...] = (
    (energon.is_energon, energon.energon_parts),
    (onevision.is_onevision, onevision.onevision_parts),
    (named.is_internvl, named.internvl_parts),
    (named.is_qwen, named.qwen_parts),
)
_USE = re.compile(r"(.+?)(?:%(\d{1,3}))?")
_LOOK_BYTES = 64 * 1024
_OBJECT_OF_OBJECTS = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def expand_mixture(
    path: str,
    *,
    images: Sequence[str] = (),
    strip_prefix: str = "",
    use: Sequence[str] = (),
    base_dir: str,
    endless: bool,
    weight_by: str = "samples",
) -> list[dict[str, Any]]:
    """The file's parts as values of `SourceSection`, paths absolute.

    `images`: more places, after those of the file; `strip_prefix` as of a source. `use`: names of
    parts, all of them when empty; "name%50" takes that random share. `base_dir`: where relative
    paths go on that name nothing below the file's own folder. Raises ConfigError.
    """
    file, parts = _parts(path, use, base_dir)
    _check_kind_of_run(file, parts, endless=endless, weight_by=weight_by)
    common = {"images": list(images), "strip_prefix": strip_prefix}
    return _sections(parts, common, endless=endless)


def named_sources(path: str, *, images: Sequence[str], base_dir: str) -> list[dict[str, Any]]:
    """As `expand_mixture`, without what only a run needs: shares and repetitions."""
    _, parts = _parts(path, (), base_dir)
    plain = [replace(part, weight=None, repeat=Fraction(1)) for part in parts]
    return _sections(plain, {"images": list(images)}, endless=False)


def is_mixture(content: object) -> bool:
    """Whether the content of a JSON or YAML file is that of a mixture, be it a wrong one."""
    return any(fits(content) for fits, _ in _FORMATS)


def is_mixture_file(path: str) -> bool:
    """Whether a local .json, .yaml or .yml is a mixture. Of a JSON file with records only the
    beginning is read."""
    if not path.endswith((".json", ".yaml", ".yml")) or not os.path.isfile(path):
        return False
    try:
        if path.endswith(".json"):
            with open(path, "rb") as file:
                if not _OBJECT_OF_OBJECTS.match(file.read(_LOOK_BYTES)):
                    return False
        return is_mixture(read_file(path, ()).content)
    except (OSError, ConfigError):
        return False


def _parts(path: str, use: Sequence[str], base_dir: str) -> tuple[MixtureFile, list[Part]]:
    if "://" in path:
        raise ConfigError(f"mixture: {path} should be a local file; its records may lie elsewhere")
    file = read_file(path, (os.path.dirname(path), base_dir))
    reader = next((read for fits, read in _FORMATS if fits(file.content)), None)
    if reader is None:
        raise file.error(
            "",
            "is none of InternVL's meta JSON (name: {root, annotation}), Energon's MetadatasetV2 "
            "(splits), LLaVA-OneVision's YAML (datasets: [{json_path}]) and Qwen's dict as JSON "
            "(name: {annotation_path, data_path})",
        )
    parts = _used(file, reader(file), use)
    file.report()
    return file, parts


def _used(file: MixtureFile, parts: list[Part], use: Sequence[str]) -> list[Part]:
    if not use:
        return parts
    by_name = {part.name: part for part in parts}
    chosen = []
    for word in use:
        match = _USE.fullmatch(word)
        name, share = (match[1], match[2]) if match and word not in by_name else (word, None)
        part = by_name.get(name)
        if part is None:
            raise ConfigError(
                f"mixture.use: {file.name} has no part {name!r}; it has {', '.join(by_name)}"
            )
        if share is not None and part.take != "all":
            raise ConfigError(f"mixture.use: {word}: {file.name} takes {part.take} of it already")
        if share is not None and not 0 < int(share) <= 100:
            raise ConfigError(f"mixture.use: {word}: should be from 1 to 100 percent")
        chosen.append(part if share is None else replace(part, take=f"random:{share}%"))
    return chosen


def _sections(parts: list[Part], common: dict[str, Any], *, endless: bool) -> list[dict[str, Any]]:
    """`common` is what all parts have."""
    names: set[str] = set()
    sections = []
    for part in parts:
        section: dict[str, Any] = {
            **common,
            "name": _free_name(part.name, names),
            "records": [part.records],
            "images": [*part.images, *common["images"]],
            "take": part.take,
            "mismatch": part.mismatch,
        }
        if endless and part.weight is not None:
            section["weight"] = str(part.weight)
        if not endless and part.repeat != 1:
            section["repeat"] = str(part.repeat)
        sections.append(section)
    return sections


def _check_kind_of_run(
    file: MixtureFile, parts: list[Part], *, endless: bool, weight_by: str
) -> None:
    repeats = energon.is_energon(file.content) and any(part.repeat != 1 for part in parts)
    weights = energon.is_energon(file.content) and any(part.weight is not None for part in parts)
    if endless and repeats:
        raise file.error("", "repetitions count in finite runs: set plan.epochs to a number")
    if not endless and weights and len(parts) > 1:
        raise file.error("", "weights of a blend count in endless runs: set plan.epochs: endless")
    if endless and weight_by == "tokens" and len(parts) > 1:
        raise file.error("", "gives shares of samples, not tokens: set plan.weight_by: samples")
    missing = [part.name for part in parts if part.weight is None]
    if endless and missing and len(parts) > 1:
        raise file.error(
            "",
            f"gives no weight for {missing[0]}, and an endless run needs them: set plan.epochs to "
            "a number, or give `length` to every part of an InternVL file",
        )


def _free_name(name: str, taken: set[str]) -> str:
    """A name for a source that none has yet."""
    plain = _NOT_IN_NAMES.sub("_", name).lstrip("._-") or "part"
    free, number = plain, 1
    while free in taken:
        number += 1
        free = f"{plain}-{number}"
    taken.add(free)
    return free
