"""Random chaos: trains 4 ranks over a real service and kills, stops and cuts at random times.

    make soak
    python tests/chaos/run.py --minutes 5 --seed 1 [--out FILE.md] [--work DIR]

At the end all runs of the trainers are joined by the states that they resumed from, and compared
with an undisturbed run. Exits with 1 on any violation, and then keeps the logs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> int:
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]
    from chaos.driver import Chaos
    from chaos.report import lines
    from figures import machine
    from support.proof import nothing_leaks

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown file for the report")
    parser.add_argument("--work", type=Path, help="where data and logs go (some 100 MB)")
    options = parser.parse_args()
    head = [f"machine:  {machine()}", f"python:   {sys.version.split()[0]}"]
    head.append(f"command:  python {' '.join(sys.argv)}")
    print("\n".join(head), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.work))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    with nothing_leaks():
        result = Chaos(folder, seconds=60 * options.minutes, seed=options.seed, say=say).run()
    found = lines(result)
    print("\n" + "\n".join(found))
    if options.out is not None:
        body = "\n".join([*head, "", *found])
        options.out.write_text(f"# Chaos, {time.strftime('%d %B %Y')}\n\n```\n{body}\n```\n")
    if result.violations:
        print(f"logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
