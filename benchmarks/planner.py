"""The planner's figures on synthetic data: two public reports' tables beside ours, then our own.

    python benchmarks/planner.py [--only SECTION ...]

    fill            packing efficiency at 8K by packer, and of ranks that pack their own shards
    dial            the two-dimensional budget
    idle            idle share against ranks, by strategy and by the LLM's time
    redistribution  gain of synchronous and of overlapped redistribution
    nbin            N open bins, by image tokens (v1) and by vision cost (v2)
    gravity         the 32K setting of Trillion Labs
    targets         every figure the planner has to reach, with its value and a mark

Runs on one core, without a GPU and without data. The workloads are those of
`dataservice simulate --synthetic`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

for _name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import planner_naver as naver  # noqa: E402 - one thread a library, said before it loads
import planner_targets as targets  # noqa: E402
import planner_trillion as trillion  # noqa: E402
from planner_common import Check, Table, environment, use_one_core  # noqa: E402

PUBLISHED: dict[str, Callable[[], list[Table]]] = {
    "fill": naver.fill,
    "dial": naver.dial,
    "idle": naver.idle,
    "redistribution": naver.redistribution,
    "nbin": trillion.nbin,
    "gravity": trillion.gravity,
}
TARGETS: dict[str, Callable[[], list[Check]]] = {
    "packing": targets.packing,
    "placement": targets.placement,
    "idle": targets.idle,
    "goodput": targets.goodput,
    "times": targets.times,
    "chain": targets.chain,
}
SECTIONS = (*PUBLISHED, "targets", *(f"targets:{name}" for name in TARGETS))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS)
    )
    given = parser.parse_args(arguments)
    chosen = tuple(given.only or (*PUBLISHED, "targets"))
    started = time.perf_counter()
    only = f" --only {' '.join(chosen)}" if given.only else ""
    print(f"command   python benchmarks/planner.py{only}")
    for name, value in environment(use_one_core()).items():
        print(f"{name:10}{value}")
    for name, section in PUBLISHED.items():
        if name in chosen:
            say(name)
            for table in section():
                print(f"\n{table.text()}", flush=True)
    checks: list[Check] = []
    for name, measure in TARGETS.items():
        if "targets" in chosen or f"targets:{name}" in chosen:
            say(f"targets: {name}")
            checks += measure()
    if checks:
        print(f"\n{_table(checks).text()}")
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if all(check.good for check in checks) else 1


def _table(checks: Sequence[Check]) -> Table:
    missed = sum(not check.good for check in checks)
    return Table(
        title=f"Figures to reach: {len(checks) - missed} of {len(checks)}",
        columns=("", "target", "found", ""),
        rows=[(c.what, c.target, c.found, "ok" if c.good else "MISSED") for c in checks],
        notes=[f"{check.what}: {check.detail}" for check in checks if check.detail],
    )


if __name__ == "__main__":
    raise SystemExit(main())
