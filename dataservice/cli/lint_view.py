"""What `dataservice lint` prints: findings as JSON, or a summary for people.

Invariants: with JSON nothing but one object a line goes to stdout; the summary holds as many kinds
of reasons as it shows, however much is wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson
import typer

from dataservice.errors import ConfigError
from dataservice.linting.findings import Finding
from dataservice.linting.reach import Reach
from dataservice.linting.run import Options, lint_config, lint_files, lint_mixture

PLACES_SHOWN = 5
"""Of each kind of reason."""
KINDS_SHOWN = 200
_EVERY = 64
"""Findings between two updates of the bar."""
_NAMES = {"image": "images", "zip": "zip members", "tar": "tar members", "jsonl": "records"}


def findings_of(files: Sequence[str], roots: Sequence[str], *, digest: bool) -> Iterator[Finding]:
    """Of one config, of one mixture, or of files; with a bar on a terminal. Raises ConfigError,
    StorageError."""
    reach = Reach()
    if not sys.stderr.isatty():
        yield from _findings(files, roots, digest=digest, reach=None)
        return
    from dataservice.cli.progress import progress

    with progress("lint", "bytes") as show:
        num_rejected = 0
        for number, finding in enumerate(_findings(files, roots, digest=digest, reach=reach)):
            yield finding
            num_rejected += finding.reason is not None
            if number % _EVERY == 0:
                said = f"{number + 1:,} looked at, {num_rejected:,} rejected"
                show(reach.done_bytes, reach.total_bytes, said)


def _findings(
    files: Sequence[str], roots: Sequence[str], *, digest: bool, reach: Reach | None
) -> Iterator[Finding]:
    mixtures = [file for file in files if _is_mixture(file)]
    if mixtures and len(files) == 1:
        return lint_mixture(mixtures[0], roots, digest=digest, reach=reach)
    if mixtures:
        raise ConfigError(f"{mixtures[0]}: a mixture names its files; lint it alone")
    configs = [file for file in files if file.lower().endswith((".yaml", ".yml"))]
    if not configs:
        return lint_files(files, roots, Options(digest=digest), reach)
    if len(files) > 1 or roots:
        raise ConfigError(f"{configs[0]}: a config names its files and image roots; lint it alone")
    from dataservice.config import load_config

    return lint_config(load_config(configs[0]), digest=digest, reach=reach)


def _is_mixture(file: str) -> bool:
    if not file.endswith((".json", ".yaml", ".yml")):
        return False
    from dataservice.config.mixtures import is_mixture_file

    return is_mixture_file(file)


def print_json(findings: Iterable[Finding], *, digest: bool) -> bool:
    """Whether all is well."""
    good = True
    for finding in findings:
        typer.echo(orjson.dumps(finding.as_object(digest=digest)))
        good = good and finding.reason is None
    return good


@dataclass(slots=True)
class _Kind:
    """Reasons that differ only in names and numbers."""

    reason: str
    """Of the first of them."""
    count: int = 0
    places: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Summary:
    checked: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    kinds: dict[str, _Kind] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        name = _NAMES[finding.kind]
        if finding.kind in ("zip", "tar") and finding.member is None:
            name = "archives"
        self.checked[name] = self.checked.get(name, 0) + 1
        if finding.reason is None:
            return
        self.rejected += 1
        pattern = re.sub(r"'[^']*'|\d+", "*", finding.reason)
        if pattern not in self.kinds and len(self.kinds) == KINDS_SHOWN:
            pattern = "other reasons"
            self.kinds.setdefault(pattern, _Kind(pattern))
        kind = self.kinds.setdefault(pattern, _Kind(finding.reason))
        kind.count += 1
        if len(kind.places) < PLACES_SHOWN:
            kind.places.append(finding.place)


def print_summary(findings: Iterable[Finding]) -> bool:
    """Whether all is well."""
    summary = _Summary()
    for finding in findings:
        summary.add(finding)
    counts = ", ".join(f"{count:,} {name}" for name, count in summary.checked.items())
    typer.echo(f"{counts or 'nothing to look at'}: {summary.rejected:,} rejected")
    for kind in sorted(summary.kinds.values(), key=lambda kind: -kind.count):
        typer.echo(f"  {kind.count:,} x {kind.reason}")
        for place in kind.places:
            typer.echo(f"      {place}")
    return not summary.rejected
