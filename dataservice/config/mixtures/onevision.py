"""LLaVA-OneVision's YAML: a list of record files, each with the part of it that is used.

`datasets: [{json_path, sampling_strategy}]`, strategies all, first:N, end:N and random:N, N also as
percent. Images lie below a folder that its trainer is given separately (`mixture.images` here).
"""

from __future__ import annotations

import posixpath
import re

from dataservice.config.mixtures.parts import MixtureFile, Part

_KNOWN = ("json_path", "sampling_strategy")
_STRATEGY = re.compile(r"all|(?:first|end|random):[0-9]+(?:\.[0-9]+)?%?")


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
        if not _STRATEGY.fullmatch(strategy):
            raise file.error(
                f"{where}.sampling_strategy",
                f"should be all, first:N, end:N or random:N, N also as 10%, got {strategy!r}",
            )
        records = file.text(entry, "json_path", where)
        parts.append(
            Part(
                name=posixpath.basename(records).split(".")[0],
                records=file.path(records, f"{where}.json_path"),
                take=strategy,
            )
        )
    return parts
