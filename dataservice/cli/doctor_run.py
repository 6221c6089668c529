"""`dataservice doctor`: looks at everything, a line each, as it is found.

Invariants: a look that fails is a problem with what it raised, and ends no other look; secrets are
not printed.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataservice.cli.doctor_config import config_findings, ports
from dataservice.cli.doctor_disks import cache_disk, state_disk
from dataservice.cli.doctor_finding import Finding, problem
from dataservice.cli.doctor_machine import machine_findings
from dataservice.cli.doctor_software import software_findings
from dataservice.config import Config, load_config
from dataservice.errors import DataServiceError

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
NAME_WIDTH = 18


def findings_of(
    path: str | None, *, cache_dir: str | None, state_dir: str | None
) -> Iterator[Finding]:
    """Of this machine and, with `path`, of a config. `cache_dir`, `state_dir`: in place of the
    config's."""
    config: Config | None = None
    if path is not None:
        try:
            config = load_config(path)
        except DataServiceError as error:
            yield problem("config", str(error), "correct it; deploy/example.yaml explains each key")
    yield from _guarded("machine", lambda: machine_findings(config))
    yield from _guarded("software", software_findings)
    yield from _guarded("disks", lambda: _disks(config, cache_dir, state_dir))
    yield from _guarded("ports", lambda: ports(None if config is None else config.serving))
    if config is not None:
        known = config
        yield from _guarded("config", lambda: config_findings(known))


def _disks(
    config: Config | None, cache_dir: str | None, state_dir: str | None
) -> Iterator[Finding]:
    elsewhere = tempfile.gettempdir()
    staging = None if config is None else config.staging
    cache = cache_dir or (None if staging is None else staging.cache_dir)
    if cache is not None or config is None:
        yield cache_disk(
            cache or elsewhere,
            budget_bytes=None if staging is None or cache_dir else staging.budget_bytes,
            field="staging.cache_dir",
        )
    state = state_dir or (elsewhere if config is None else config.state_dir)
    yield state_disk(state, field="state_dir")


def _guarded(what: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:
        yield problem(
            what,
            f"could not be looked at: {type(error).__name__}: {error}",
            "run it with --debug and report it; the rest holds",
        )


def show(findings: Iterable[Finding], *, as_json: bool) -> bool:
    """Whether there is no problem."""
    found = []
    console = Console()
    for finding in findings:
        found.append(finding)
        if not as_json:
            console.print(_row(finding))
    levels = Counter(finding.level for finding in found)
    if as_json:
        told = {
            "ok": not levels["problem"],
            "findings": [dataclasses.asdict(finding) for finding in found],
        }
        console.file.write(f"{orjson.dumps(told).decode()}\n")
    else:
        console.print(
            Text(f"{levels['ok']} ok, warnings: {levels['warning']}, problems: {levels['problem']}")
        )
    return not levels["problem"]


def _row(finding: Finding) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=len("problem"))
    row.add_column(width=NAME_WIDTH)
    row.add_column()
    words = Text(finding.words)
    if finding.remedy:
        words.append(f"\n{finding.remedy}", style="italic")
    row.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.name), words)
    return row
