"""What a chaos run found, in lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from chaos.driver import Result


def lines(result: Result) -> list[str]:
    proof = result.proof
    times = [t for its in result.recoveries.values() for t in its]
    sizes = ", ".join(f"{count} x DP {size}" for size, count in sorted(result.dp_sizes.items()))
    found = [
        f"{len(result.struck)} faults in {result.seconds:.0f} s; {result.starts} starts of the "
        f"training run ({sizes})",
        f"final history: {proof.steps} steps, {proof.packs} packs, "
        + ("NOT " if proof.violations else "")
        + f"each exactly once and as undisturbed; {proof.undone} more in steps that were undone",
        f"longest wait of a trainer after a fault: {_times(times)}",
        "",
        *_table(
            ["fault", "times", "median s", "p99 s", "worst s"],
            [
                [kind, str(count), *_figures(result.recoveries.get(kind, []))]
                for kind, count in sorted(Counter(s.name for s in result.struck).items())
            ],
        ),
        *(f"left out: {kind} ({why})" for kind, why in result.left_out.items()),
        "",
        *_table(["memory, MB", "start", "end", "most"], _memory(result.memory)),
        "",
        "processes that ended: " + _exits(result.exits),
        "counters: "
        + ", ".join(f"{name} {value}" for name, value in sorted(result.counters.items())),
        "",
        *(f"VIOLATION  {text}" for text in result.violations[:50]),
        f"{len(result.violations)} violations",
    ]
    return found


def _times(times: Sequence[float]) -> str:
    if not times:
        return "none"
    median, p99, worst = _figures(times)
    return f"median {median} s, p99 {p99} s, worst {worst} s"


def _figures(times: Sequence[float]) -> list[str]:
    if not times:
        return ["-"] * 3
    return [f"{np.percentile(times, q):.1f}" for q in (50, 99, 100)]


def _memory(samples: Sequence[dict[str, int]]) -> list[list[str]]:
    """By role: the largest process of it."""
    by_role: list[dict[str, int]] = []
    for sample in samples:
        roles: dict[str, int] = {}
        for name, size in sample.items():
            role = name.split("-")[0].split(" ")[0]
            roles[role] = max(roles.get(role, 0), size)
        by_role.append(roles)
    names = sorted({role for roles in by_role for role in roles})
    rows = []
    for name in names:
        sizes = [roles[name] / 1e6 for roles in by_role if name in roles]
        rows.append([name, *(f"{value:.0f}" for value in (sizes[0], sizes[-1], max(sizes)))])
    return rows


def _exits(exits: Counter[tuple[str, int]]) -> str:
    return ", ".join(f"{count} x {name} ({code})" for (name, code), count in sorted(exits.items()))


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
