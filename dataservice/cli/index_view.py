"""How an index run looks to a person: a progress bar, then what could not be used and why.

Invariants: everything but the summary of `dataservice index` goes to stderr; rejected records are
read back as a stream, so a million of them cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import typer

from dataservice.cli.progress import progress
from dataservice.config import Config
from dataservice.errors import ConfigError
from dataservice.indexing import update_index
from dataservice.storage.index import Index
from dataservice.storage.index_executor import IndexExecutor, InProcesses
from dataservice.storage.index_report import IndexProgress, IndexReport, SourceReport

PLACES_SHOWN = 3
"""Of each kind of reason."""


@contextmanager
def progress_bar() -> Iterator[Callable[[IndexProgress], None]]:
    with progress("index", "bytes") as bar:
        begun = time.monotonic()

        def show(state: IndexProgress) -> None:
            rate = state.num_samples / max(time.monotonic() - begun, 1e-3)
            bad = f", {state.num_rejected:,} rejected" if state.num_rejected else ""
            said = f"{rate:,.0f} samples/s{bad} {state.shard}"
            bar(state.done_bytes, state.total_bytes, said)

        yield show


def update_with_progress(config: Config, executor: IndexExecutor | None = None) -> IndexReport:
    with progress_bar() as show:
        return update_index(config, show, executor=executor)


def open_index(config: Config) -> Index:
    """The index as the data stands now; says so when something had to be read for it."""
    if config.index == "lazy":
        from dataservice.cli.lazy_view import open_lazy

        return open_lazy(config)
    report = update_with_progress(config)
    shards_read = sum(source.shards_read for source in report.sources)
    if shards_read:
        reused = sum(source.shards_reused for source in report.sources)
        typer.echo(
            f"index: read {shards_read:,} shards, {reused:,} were up to date; "
            f"{_good(report)} samples, {report.num_rejected:,} records cannot be used"
            + (f" (see {report.rejected_path})" if report.num_rejected else ""),
            err=True,
        )
    _check_usable(report)
    return Index.open(config.index_dir)


def _check_usable(report: IndexReport) -> None:
    """Says which sources have no record that can be used; ConfigError where none has."""
    bad = [of for of in report.sources if of.num_samples == of.num_rejected > 0]
    where = f"{report.rejected_path} says why, `dataservice index` how often"
    if report.num_samples == report.num_rejected > 0:
        raise ConfigError(
            f"sources: none of the {report.num_samples:,} records can be used; the first: "
            f"{report.examples[0].reason}; {where}"
        )
    for of in bad:
        typer.echo(
            f"warning: source {of.name}: none of its {of.num_samples:,} records can be used; "
            f"{where}",
            err=True,
        )


def index_with_progress(
    config: Config, *, processes: int | None, address: str | None, as_json: bool = False
) -> None:
    """`dataservice index`: by processes of this machine, or by the Ray cluster at `address`."""
    if config.index == "lazy":
        from dataservice.cli.lazy_view import show_scan

        show_scan(config, as_json=as_json)
        return
    if address is None:
        report = update_with_progress(config, InProcesses(processes) if processes else None)
    elif processes:
        raise ConfigError("--processes and --address exclude each other; give one of them")
    else:
        from dataservice.actors.ray_index import ray_executor

        with ray_executor(address, resource=config.workers.resource) as executor:
            report = update_with_progress(config, executor)
    if as_json:
        typer.echo(orjson.dumps(report_object(report)))
    else:
        show_report(report)


def report_object(report: IndexReport) -> dict[str, Any]:
    """For --json; `rejected_by_reason` has every kind of reason, its first places with it."""
    kinds = kinds_of(report.rejected_path) if report.num_rejected else []
    return {
        "index": "full",
        "digest": report.digest,
        "num_samples": report.num_samples - report.num_rejected,
        "num_rejected": report.num_rejected,
        "rejected_path": report.rejected_path if report.num_rejected else None,
        "rejected_by_reason": kinds_object(kinds),
        "unread": list(report.unread),
        "sources": [
            {
                **dataclasses.asdict(source),
                "num_samples": source.num_samples - source.num_rejected,
            }
            for source in report.sources
        ],
    }


def kinds_object(kinds: Sequence[_Kind]) -> list[dict[str, Any]]:
    return [{"count": kind.count, "reason": kind.reason, "places": kind.places} for kind in kinds]


def show_report(report: IndexReport) -> None:
    """The summary of `dataservice index`, to stdout."""
    for source in report.sources:
        typer.echo(
            f"{source.name}: {_good(source)} samples, {source.num_images:,} images, "
            f"{source.text_tokens:,} text tokens ({source.loss_tokens:,} with loss); "
            f"{source.shards_read:,} shards read, {source.shards_reused:,} up to date"
        )
    typer.echo(f"in all {_good(report)} samples; index {report.digest[:12]}")
    if report.num_rejected:
        typer.echo(f"{report.num_rejected:,} records cannot be used ({report.rejected_path}):")
        show_kinds(report.rejected_path)


def show_kinds(rejected_path: str) -> None:
    """The reasons why records cannot be used, each with how many and where."""
    for kind in kinds_of(rejected_path):
        typer.echo(f"  {kind.count:,} x {kind.reason}")
        for place in kind.places:
            typer.echo(f"      {place}")


def _good(report: IndexReport | SourceReport) -> str:
    return f"{report.num_samples - report.num_rejected:,}"


@dataclass(slots=True)
class _Kind:
    """Reasons that differ only in names and numbers."""

    reason: str
    """Of the first of them."""
    count: int = 0
    places: list[str] = field(default_factory=list)


def kinds_of(rejected_path: str) -> list[_Kind]:
    kinds: dict[str, _Kind] = {}
    with open(rejected_path, encoding="utf-8") as file:
        for line in file:
            rejected = json.loads(line)
            pattern = re.sub(r"'[^']*'|\d+", "*", rejected["reason"])
            kind = kinds.setdefault(pattern, _Kind(rejected["reason"]))
            kind.count += 1
            if len(kind.places) < PLACES_SHOWN:
                kind.places.append(f"{rejected['file']}:{rejected['line']}")
    return sorted(kinds.values(), key=lambda kind: -kind.count)
