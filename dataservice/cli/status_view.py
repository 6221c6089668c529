"""The status of a running service for people, in 80 columns; `--json` has every value."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table


def print_status(report: dict[str, Any], console: Console) -> None:
    """Who waits first, then workers, stagers and holes."""
    console.print(_facts(report))
    if report.get("workers"):
        console.print(_workers(report["workers"]))
    if report.get("stagers"):
        console.print(_stagers(report["stagers"]))
    for trouble in _storage_troubles(report) + _picture_troubles(report):
        console.print(trouble, highlight=False)
    for shard, count in report.get("worst_shards", {}).items():
        console.print(f"holes in {shard}: {count:,}", highlight=False)
    if report.get("quarantine"):
        console.print(f"every hole: {report['quarantine']}", highlight=False)


def _facts(report: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    session = report.get("session")
    facts = {
        "job": report.get("job"),
        "state": report.get("state"),
        "plan": str(report.get("plan_digest", ""))[:12],
        "samples": report.get("samples"),
        "workers": _number(report),
        "holes": _holes(report),
        "session": "no trainer yet" if session is None else _session(session),
    }
    for name, value in facts.items():
        table.add_row(name, _text(value))
    if report.get("winding_down"):
        table.add_row("drains", "no more steps are handed out")
    if report.get("drained_nodes"):
        nodes = [node[:8] for node in report["drained_nodes"]]
        table.add_row("drained nodes", ", ".join(nodes[:8]) + " ..." * (len(nodes) > 8))
    if report.get("scaling"):
        table.add_row("scaling", report["scaling"]["reason"])
    if report.get("counting"):
        table.add_row("lazy index", _counting(report["counting"]))
    if session is not None:
        waits = session["waited_s"]
        slowest = max(range(len(waits)), key=waits.__getitem__)
        table.add_row("longest wait", f"rank {slowest}, {waits[slowest]:,.1f} s in all")
        if session["failure"]:
            table.add_row("failure", session["failure"])
    return table


def _number(report: dict[str, Any]) -> str:
    waiting = report.get("workers_without_room", 0)
    room = f"; Ray has no room for {waiting} (workers.num_cpus, resource)" if waiting else ""
    return f"{len(report.get('workers', []))} of {report.get('target_workers', 0)} wanted{room}"


def _holes(report: dict[str, Any]) -> str:
    if "bad_image" not in report:  # the service is still opening its index
        return ""
    return f"{report['holes']:,} (bad_image: {report['bad_image']})"


def _counting(counting: dict[str, Any]) -> str:
    """Of a lazy index."""
    waits = f"; {counting['waiting_for']}" if counting["waiting_for"] else ""
    return (
        f"{counting['blocks']:,} blocks counted, {counting['records']:,} records, of which "
        f"{counting['rejected']:,} cannot be used{waits}"
    )


def _session(session: dict[str, Any]) -> str:
    end = f" of {session['end_step']}" if session["end_step"] >= 0 else ""
    return (
        f"run {session['run_id']}: step {session['done_step']}{end}, {session['dp_size']} ranks, "
        f"{session['micro_steps']} micro-steps"
    )


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = _table("worker", "node", "ready", "memory", "queued", "served", "images", "origin")
    for worker in workers:
        table.add_row(
            worker["id"] + (" (draining)" if worker["draining"] else ""),
            worker["node"][:8],
            *(f"{worker['ready_packs']:,}", decimal(worker["ready_bytes"])),
            *(f"{worker[n]:,}" for n in ("queued_packs", "served_packs", "images")),
            decimal(worker["read_origin_bytes"]),
        )
    return table


def _stagers(stagers: list[dict[str, Any]]) -> Table:
    table = _table(
        "stager",
        "host",
        *("staged", "of", "to copy", "a second", "no\nroom", "dropped", "stalls"),
    )
    for stager in stagers:
        sizes = ("cached_bytes", "budget_bytes", "missing_bytes", "bytes_per_s")
        table.add_row(
            stager["node"][:8],
            stager["host"][:12],
            *(decimal(round(stager[n])) for n in sizes),
            *(f"{stager[n]:,}" for n in ("read_through_shards", "evictions", "stalls")),
        )
    return table


def _storage_troubles(report: dict[str, Any]) -> list[str]:
    """What makes reads slow, one line each."""
    found = []
    for worker in report.get("workers", []):
        if worker.get("storage_stalls") or worker.get("stuck_reads"):
            found.append(
                f"storage stalls of worker {worker['id']}: {worker['storage_stalls']:,} builds "
                f"failed at a read's deadline, {worker['stuck_reads']:,} reads hang now"
            )
    for stager in report.get("stagers", []):
        if stager["read_through_shards"]:
            found.append(
                f"no room on {stager['host']}: {stager['read_through_shards']:,} shards of "
                f"{decimal(stager['read_through_bytes'])} are read from their origins"
            )
        if stager["last_error"]:
            found.append(
                f"staging on {stager['host']}: {stager['errors']:,} copies failed, last: "
                f"{stager['last_error']}"
            )
    return found


def _picture_troubles(report: dict[str, Any]) -> list[str]:
    """Workers with decoders that hang, one line each."""
    found = []
    for worker in report.get("workers", []):
        if worker.get("retiring"):
            found.append(f"worker {worker['id']} retires: {worker['retiring']}")
        elif worker.get("stuck_decodes"):
            found.append(
                f"worker {worker['id']}: {worker['stuck_decodes']:,} decodes hang past their "
                "deadline"
            )
    return found


def _table(first: str, second: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in (first, second):
        table.add_column(name, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
