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
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

from figures import Figure, machine, show, show_reached

PARTS = ("records", "index", "lazy", "staging", "scale")
LIBRARIES = ("numpy", "pyarrow", "orjson", "msgspec", "zlib-ng", "isal", "zstandard")


def measured(part: str, quick: bool) -> list[Figure]:
    command = [sys.executable, __file__, "--inside", part, *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [Figure(**figure) for figure in json.loads(done.stdout.splitlines()[-1])]


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
    return int(not show_reached(every))


if __name__ == "__main__":
    sys.exit(main())
