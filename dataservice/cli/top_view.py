"""One look of `dataservice top`: the verdict first, then ranks, workers, staging and events.

Invariants: a pure function of a service's status and the size of the terminal, never higher or
wider than it where it has 20 lines; a number says what colour says; what an older service does not
tell is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dataservice.core.autoscale import WAITS

_STYLES = {"ok": "bold green", "idle": "bold", "warning": "bold yellow", "error": "bold red"}
_EVENTS = {"warning": "yellow", "error": "red"}
_STEPS = " ▁▂▃▄▅▆▇█"
"""Of a share, from nothing to all."""
BAR = 8
"""Characters of a bar."""
LEAST_ROWS = 2
"""Of a table that has any."""


def view_of(
    report: dict[str, Any] | None,
    *,
    endpoint: str,
    trouble: str,
    silent_s: float,
    width: int,
    height: int,
    keys: bool = True,
) -> RenderableType:
    """`report`: the status that was last answered; `trouble`: why there is none since `silent_s`,
    or ""; `keys`: whether they are listened to."""
    if report is None:
        words = trouble or f"asking {endpoint}"
        return Group(Text(words, style="bold yellow" if trouble else "bold", overflow="fold"))
    parts: list[RenderableType] = [_title(report, endpoint, width)]
    if trouble:
        gone = f"Last heard {silent_s:.0f} s ago: {trouble}"
        parts.append(_fitted(gone, width, "bold red"))
    parts += _verdict(report, width)
    parts += _ranks((report.get("session") or {}).get("waited_share", ()), width)
    fixed = len(parts) + 2  # holes, and the last line
    workers, stagers = report.get("workers", []), report.get("stagers", [])
    events = report.get("events", [])
    shown = _shared_out(height - fixed, (len(workers), len(stagers), len(events)))
    parts += _table_of_workers(workers, report, shown[0])
    parts += _table_of_stagers(stagers, shown[1])
    parts.append(_holes(report, width))
    parts += _events(events, shown[2], width)
    if keys:
        parts.append(Text("q ends", style="dim"))
    return Group(*parts)


def _shared_out(height: int, wanted: tuple[int, int, int]) -> list[int]:
    """Lines of workers, stagers and events, heads of tables not counted, that fit below each
    other. Workers take what the others leave."""
    heads = [3 * (wanted[0] > 0), 3 * (wanted[1] > 0), wanted[2] > 0]
    left = height - sum(heads)
    shown = [0, 0, 0]
    for i, share in ((1, 0.25), (2, 0.34)):
        shown[i] = min(wanted[i], max(LEAST_ROWS, int(left * share)))
    shown[0] = max(min(wanted[0], LEAST_ROWS), left - shown[1] - shown[2])
    return [max(0, rows) for rows in shown]


def _title(report: dict[str, Any], endpoint: str, width: int) -> Text:
    session = report.get("session")
    words = [str(report.get("job", "")), endpoint, str(report.get("state", ""))]
    if report.get("winding_down"):
        words[-1] = "drains: no more steps are handed out"
    if session is not None:
        end = f" of {session['end_step']:,}" if session["end_step"] >= 0 else ""
        words.append(f"step {session['done_step']:,}{end}")
    rates = report.get("rates") or {}
    for name, shown, digits in (("packs_per_s", "packs/s", 1), ("steps_per_s", "steps/s", 2)):
        if rates.get(name) is not None:
            words.append(f"{rates[name]:,.{digits}f} {shown}")
    return _fitted(" | ".join(words), width, "reverse", pad=True)


def _verdict(report: dict[str, Any], width: int) -> list[RenderableType]:
    """Whether a rank waits, and for whom, as the status page has it."""
    told = report.get("verdict")
    if not told:
        return []
    why = [_fitted(told["why"], width, "")] if told.get("why") else []
    return [_fitted(f"{told['text']}.", width, _STYLES.get(told["level"], "bold")), *why]


def _ranks(shares: Sequence[float], width: int) -> list[RenderableType]:
    if not shares:
        return []
    room = max(1, width - 2)
    per = -(-len(shares) // room)
    folded = [max(shares[i : i + per]) for i in range(0, len(shares), per)]
    strip = Text("|")
    for share in folded:
        level = min(len(_STEPS) - 1, round(share * (len(_STEPS) - 1)))
        if share > 0:
            level = max(1, level)
        strip.append(_STEPS[level], style="yellow" if share > WAITS else "green")
    strip.append("|")
    longest = max(range(len(shares)), key=shares.__getitem__)
    each = f"{per} ranks a character" if per > 1 else f"ranks 0 to {len(shares) - 1}"
    middle = sorted(shares)[len(shares) // 2]
    words = (
        f"waits, {each}: longest rank {longest} {shares[longest]:.0%}, median {middle:.0%}, "
        f"all together {sum(shares) / len(shares):.1%}"
    )
    return [_fitted(words, width, ""), strip]


def _table_of_workers(
    workers: list[dict[str, Any]], report: dict[str, Any], rows: int
) -> list[RenderableType]:
    wanted = report.get("target_workers", 0)
    if not workers:
        room = report.get("workers_without_room", 0)
        why = f"; Ray has no room for {room}" if room else ""
        return [Text(f"workers: none of {wanted} wanted{why}", style="bold")]
    table = _table(
        *(f"workers {len(workers)}/{wanted}", "node"),
        *("ready", "", "packs", "queued", "busy", "images/s"),
    )
    most = max(1, *(worker["ready_bytes"] for worker in workers))
    ordered = sorted(workers, key=lambda w: (not w["draining"], w["id"]))
    shown, more = _cut(ordered, rows)
    for worker in shown:
        state = " (leaves)" if worker["draining"] else ""
        table.add_row(
            worker["id"] + state,
            worker["node"][:8],
            decimal(worker["ready_bytes"]),
            _bar(worker["ready_bytes"] / most),
            f"{worker['ready_packs']:,}",
            f"{worker['queued_packs']:,}",
            _percent(worker.get("busy_share")),
            f"{worker['images_per_s']:,.0f}" if "images_per_s" in worker else "",
        )
    if more:
        table.add_row(f"and {more} more", *[""] * 7)
    return [table]


def _table_of_stagers(stagers: list[dict[str, Any]], rows: int) -> list[RenderableType]:
    if not stagers or rows <= 0:
        return []
    table = _table("stager", "host", "staged", "", "to copy", "a second", "left", "hits")
    shown, more = _cut(stagers, rows)
    for stager in shown:
        whole = stager["cached_bytes"] + stager["missing_bytes"]
        table.add_row(
            stager["node"][:8],
            stager["host"][:14],
            decimal(stager["cached_bytes"]),
            _bar(stager["cached_bytes"] / whole if whole else 1.0),
            decimal(stager["missing_bytes"]),
            decimal(round(stager["bytes_per_s"])),
            _left(stager),
            _percent(stager.get("hit_rate")),
        )
    if more:
        table.add_row(f"and {more} more", *[""] * 7)
    return [table]


def _left(stager: dict[str, Any]) -> str:
    if not stager["missing_bytes"]:
        return "done"
    left_s = stager.get("left_s")
    if left_s is None:
        return ""
    return f"{left_s / 60:.0f} min" if left_s >= 120 else f"{left_s:.0f} s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _holes(report: dict[str, Any], width: int) -> Text:
    holes = report.get("holes", 0)
    words = f"holes: {holes:,}"
    reasons = report.get("holes_by_reason") or {}
    if reasons:
        words += f" ({', '.join(f'{name} {count:,}' for name, count in reasons.items())})"
    for shard, count in list(report.get("worst_shards", {}).items())[:1]:
        words += f"; most in {shard}: {count:,}"
    return _fitted(words, width, "yellow" if holes else "")


def _events(events: list[dict[str, Any]], rows: int, width: int) -> list[RenderableType]:
    if not events or rows <= 0:
        return []
    lines: list[RenderableType] = [Text("events", style="bold")]
    for event in events[-rows:][::-1]:
        at = time.strftime("%H:%M:%S", time.localtime(event["at_s"]))
        level = event.get("level", "info")
        mark = f" {level}:" if level in _EVENTS else ""
        lines.append(_fitted(f"{at}{mark} {event['text']}", width, _EVENTS.get(level, "")))
    return lines


def _bar(share: float) -> str:
    full = min(BAR, round(max(0.0, share) * BAR))
    return "█" * full + "·" * (BAR - full)


def _cut(rows: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """At most so many, one of which says how many more there are."""
    if len(rows) <= most:
        return rows, 0
    return rows[: max(0, most - 1)], len(rows) - max(0, most - 1)


def _table(first: str, second: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in (first, second):
        table.add_column(name, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    return table


def _fitted(words: str, width: int, style: str, *, pad: bool = False) -> Text:
    """On one line; what a service says of itself is no markup and moves no cursor."""
    plain = "".join(c if c.isprintable() else " " for c in " ".join(words.split()))
    if len(plain) > width:
        plain = plain[: max(0, width - 3)] + "..."
    return Text(plain.ljust(width) if pad else plain, style=style, no_wrap=True, end="\n")
