"""Energon's Metadataset: a tree of blends over JSONL data sets, with folders of media beside them.

`splits.train` is a `path`, a `blend` (weights: shares of samples) or a `blend_epochized` (whole or
broken repetitions), and a path may be another such file; weights within a blend are shares of that
blend's weight. JSONL files are read, with `aux` folders and prepared tar sets as places of images;
data sets that are tars themselves, and joins, are refused with the reason.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from dataservice.config.mixtures.parts import MixtureFile, Part, percent, read_file

_DEEPEST = 16
_BLENDS = ("blend", "blend_epochized", "datasets")
_KNOWN = (*_BLENDS, "path", "weight", "repetitions", "subset", "aux")
_IDLE = (
    "subflavor",
    "subflavors",
    "split_part",
    "dataset_config",
    "split_config",
    "shuffle_over_epochs_multiplier",
)
_RECORDS = re.compile(r"\.jsonl?(\.gz|\.zst|\.zip)?$")
_ONLY = "only subsets that begin at the first sample or end at 100% are read; split the file"
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,12})?)%")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subset:
    """From `start` to `stop`: shares of the data set, or numbers of its samples."""

    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)
    absolute: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Above:
    """What the nodes above one say of it."""

    weight: Fraction | None = None
    repeat: Fraction = Fraction(1)
    subsets: tuple[_Subset, ...] = ()
    """Innermost last."""
    images: tuple[str, ...] = ()
    depth: int = 0


def is_energon(content: object) -> bool:
    return isinstance(content, dict) and (
        isinstance(content.get("splits"), dict)
        or (isinstance(name := content.get("__class__"), str) and "etadataset" in name)
    )


def energon_parts(file: MixtureFile) -> list[Part]:
    return _of_file(file, "train", _Above())


def _of_file(file: MixtureFile, split: str, above: _Above) -> list[Part]:
    top = file.mapping(file.content, "")
    file.keys(top, "", ("splits", "__module__", "__class__"), ())
    splits = file.mapping(top.get("splits"), "splits")
    if split not in splits:
        raise file.error("splits", f"has no {split}; it has {', '.join(splits) or 'nothing'}")
    return _of_node(file, file.mapping(splits[split], f"splits.{split}"), f"splits.{split}", above)


def _of_node(file: MixtureFile, node: dict[str, Any], where: str, above: _Above) -> list[Part]:
    if "join" in node:
        raise file.error(
            where, "joined data sets are not read: join them into one JSONL file first"
        )
    file.keys(node, where, _KNOWN, _IDLE)
    kinds = [key for key in ("path", *_BLENDS) if key in node]
    if len(kinds) != 1:
        raise file.error(where, f"should have one of path, blend and blend_epochized, has {kinds}")
    above = replace(
        above,
        images=(*above.images, *_images(file, node.get("aux"), f"{where}.aux")),
        subsets=(*above.subsets, *_subset(file, node.get("subset"), f"{where}.subset")),
    )
    if kinds == ["path"]:
        return _of_path(file, node, where, above)
    children = [
        file.mapping(child, f"{where}.{kinds[0]}[{number}]")
        for number, child in enumerate(file.items(node[kinds[0]], f"{where}.{kinds[0]}"))
    ]
    if kinds == ["blend_epochized"]:
        return _of_epochized(file, children, f"{where}.{kinds[0]}", above)
    return _of_blend(file, children, f"{where}.{kinds[0]}", above)


def _of_blend(
    file: MixtureFile, children: list[dict[str, Any]], where: str, above: _Above
) -> list[Part]:
    if above.repeat != 1:
        raise file.error(where, "blend inside blend_epochized cannot be read: use one of them")
    _refuse(
        file, children, "repetitions", "count in blend_epochized; in a blend give weight", where
    )
    weights = [
        file.number(child, "weight", f"{where}[{number}]") or Fraction(1)
        for number, child in enumerate(children)
    ]
    # The shares of an inner blend divide the weight of the outer one.
    scale = Fraction(1) if above.weight is None else above.weight / sum(weights)
    parts = []
    for number, child in enumerate(children):
        inner = replace(above, weight=weights[number] * scale)
        parts += _of_node(file, child, f"{where}[{number}]", inner)
    return parts


def _of_epochized(
    file: MixtureFile, children: list[dict[str, Any]], where: str, above: _Above
) -> list[Part]:
    if above.weight is not None:
        raise file.error(where, "blend_epochized inside blend cannot be read: use one of them")
    _refuse(
        file, children, "weight", "counts in a blend; in blend_epochized give repetitions", where
    )
    parts = []
    for number, child in enumerate(children):
        times = file.number(child, "repetitions", f"{where}[{number}]") or Fraction(1)
        inner = replace(above, repeat=above.repeat * times)
        parts += _of_node(file, child, f"{where}[{number}]", inner)
    return parts


def _refuse(
    file: MixtureFile, children: list[dict[str, Any]], key: str, why: str, where: str
) -> None:
    for number, child in enumerate(children):
        if key in child:
            raise file.error(f"{where}[{number}].{key}", f"{child[key]!r} {why}")


def _of_path(file: MixtureFile, node: dict[str, Any], where: str, above: _Above) -> list[Part]:
    path = file.path(file.text(node, "path", where), f"{where}.path")
    if path.endswith((".yaml", ".yml")) and "://" not in path:
        if above.depth >= _DEEPEST:
            raise file.error(where, f"files name each other more than {_DEEPEST} deep")
        inner = read_file(path, (os.path.dirname(path),), file.notes)
        split = str(node.get("split_part") or "train")
        return _of_file(inner, split, replace(above, depth=above.depth + 1))
    if not _RECORDS.search(path):
        raise file.error(
            f"{where}.path",
            f"{path} is not a JSONL file: samples that are members of tars are not read; write "
            "their records to a JSONL file and give the tars as its aux",
        )
    return [
        Part(
            name=posixpath.basename(path).split(".")[0],
            records=path,
            images=above.images,
            take=_take(file, above.subsets, where),
            repeat=above.repeat,
            weight=above.weight,
        )
    ]


def _images(file: MixtureFile, aux: object, where: str) -> list[str]:
    """Folders and tars of an `aux` mapping."""
    places = []
    for name, value in file.mapping({} if aux is None else aux, where).items():
        if not isinstance(value, str):
            raise file.error(f"{where}.{name}", f"should be a path, got {value!r}")
        kind, marked, rest = value.partition("://")
        if not marked:
            places.append(file.path(value, where).rstrip("/") + "/**/*.tar")
        elif kind == "filesystem":
            places.append(file.path(rest, where))
        else:
            raise file.error(
                f"{where}.{name}",
                f"{kind}:// is not read: give a folder as filesystem://PATH, or the images as "
                "mixture.images",
            )
    return places


def _subset(file: MixtureFile, value: object, where: str) -> list[_Subset]:
    if value is None:
        return []
    entry = file.mapping(value, where)
    file.keys(entry, where, ("range",), ())
    ends = file.items(entry.get("range"), f"{where}.range")
    if len(ends) == 2 and str(ends[1]).strip() == "end":
        if ends[0] not in (0, "0%"):
            raise file.error(f"{where}.range", f"{_ONLY}, got {ends}")
        return []
    shares = [_PERCENT.fullmatch(str(end)) for end in ends]
    if len(ends) == 2 and all(shares):
        start, stop = (Fraction(share[1]) / 100 for share in shares if share)
        absolute = False
    elif len(ends) == 2 and all(type(end) is int for end in ends):
        start, stop = (Fraction(end) for end in ends)
        absolute = True
    else:
        raise file.error(
            f"{where}.range", f'should be such as ["0%", "50%"] or [0, 1000], got {ends}'
        )
    if not 0 <= start < stop or (not absolute and stop > 1):
        raise file.error(f"{where}.range", f"should go from a lower to a higher place, got {ends}")
    return [_Subset(start=start, stop=stop, absolute=absolute)]


def _take(file: MixtureFile, subsets: tuple[_Subset, ...], where: str) -> str:
    """Inner subsets first, each outer one within what they leave."""
    kept = _Subset()
    for number, subset in enumerate(reversed(subsets)):
        if subset.absolute:
            if number:
                raise file.error(where, "numbers in a subset belong to the innermost data set")
            kept = subset
        else:
            width = kept.stop - kept.start
            kept = _Subset(
                start=kept.start + width * subset.start,
                stop=kept.start + width * subset.stop,
                absolute=kept.absolute,
            )
    if kept.absolute and kept.start == 0:
        return f"first:{int(kept.stop)}"
    if not kept.absolute and kept.start == 0:
        return "all" if kept.stop == 1 else f"first:{percent(kept.stop)}"
    if not kept.absolute and kept.stop == 1:
        return f"end:{percent(1 - kept.start)}"
    raise file.error(where, _ONLY)
