"""Every figure of storage: records, index, lazy index, staging, and data sets of odd sizes.

python benchmarks/storage.py [--quick] [--only PART ...]

Figures are CPU or wall time as their notes say, medians, on data made for the purpose. A part runs
in a process of its own, so that none inherits another's memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from figures import Figure

PARTS = ("records", "index", "lazy", "staging", "scale")
LIBRARIES = ("numpy", "pyarrow", "orjson", "msgspec", "zlib-ng", "isal", "zstandard")


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else 'unknown CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, load {os.getloadavg()[0]:.2f} at the start"
    )


def measured(part: str, quick: bool) -> list[Figure]:
    command = [sys.executable, __file__, "--inside", part, *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [Figure(**figure) for figure in json.loads(done.stdout.splitlines()[-1])]


def show(figure: Figure) -> None:
    mark = {None: "    ", True: "ok  ", False: "MISS"}[figure.reached]
    value = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
    target = f" (to reach: {figure.target})" if figure.target else ""
    print(f"{mark} {figure.name}: {value} {figure.unit}{target}")
    if figure.note:
        print(textwrap.indent(textwrap.fill(figure.note, 92), " " * 9))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="rough figures in a minute or two")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        part = importlib.import_module(f"storage_{options.inside}")
        print(json.dumps([dataclasses.asdict(figure) for figure in part.run(options.quick)]))
        return 0
    print(f"machine:  {machine()}")
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    print(f"versions: Python {platform.python_version()}, {versions}")
    print(f"command:  python benchmarks/storage.py {' '.join(sys.argv[1:])}".rstrip())
    every: list[Figure] = []
    for part in options.only:
        print(f"\n{part}\n{'-' * len(part)}")
        for figure in measured(part, options.quick):
            show(figure)
            every.append(figure)
    aimed = [figure for figure in every if figure.reached is not None]
    reached = sum(bool(figure.reached) for figure in aimed)
    print(f"\nFigures to reach: {reached} of {len(aimed)}")
    return int(reached < len(aimed))


if __name__ == "__main__":
    sys.exit(main())
