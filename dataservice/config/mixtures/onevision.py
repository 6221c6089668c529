"""LLaVA-OneVision's YAML: a list of record files, each with the part of it that is used.

`datasets: [{json_path, sampling_strategy}]`, strategies all, first:N, end:N and random:N, N also as
percent. Images lie below a folder that its trainer is given separately (`mixture.images` here).
"""

from __future__ import annotations

import posixpath

from dataservice.config.mixtures.parts import MixtureFile, Part
from dataservice.config.values import checked_take

_KNOWN = ("json_path", "sampling_strategy")


def is_onevision(content: object) -> bool:
    return isinstance(content, dict) and isinstance(content.get("datasets"), list)


def onevision_parts(file: MixtureFile) -> list[Part]:
    top = file.mapping(file.content, "")
    file.keys(top, "", ("datasets",), ())
    parts = []
    for number, value in enumerate(file.items(top["datasets"], "datasets")):
        where = f"datasets[{number}]"
        entry = file.mapping(value, where)
        file.keys(entry, where, _KNOWN, ())
        strategy = str(entry.get("sampling_strategy", "all")).replace(" ", "")
        try:
            checked_take(strategy)
        except ValueError as error:
            raise file.error(f"{where}.sampling_strategy", f"{error}, got {strategy!r}") from None
        records = file.text(entry, "json_path", where)
        parts.append(
            Part(
                name=posixpath.basename(records).split(".")[0],
                records=file.path(records, f"{where}.json_path"),
                take=strategy,
            )
        )
    return parts
