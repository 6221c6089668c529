"""Fuzzes the targets with coverage guidance: python tests/fuzz/run.py [TARGET ...] [--seconds S]

Needs `pip install atheris`. An input that fails is written to tests/fuzz/found/TARGET/, from where
the tests replay it ever after; the exit status then is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOUND = HERE / "found"


ROUND_S = 30
"""A process lasts so long: atheris loses a little memory at every comparison of numpy arrays."""


def main() -> int:
    sys.path.insert(0, str(HERE.parent))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=300, help="for each target")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.corpus:
        return _fuzz(options.targets[0], options.seconds, options.corpus)
    from fuzz.targets import SEEDS, TARGETS

    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown target {unknown[0]}; known: {', '.join(TARGETS)}")
    failed = []
    for name in options.targets or TARGETS:
        with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as corpus:
            for number, seed in enumerate(SEEDS[name]):
                Path(corpus, f"seed-{number}").write_bytes(seed)
            if not all(_round(name, s, corpus) for s in _rounds(options.seconds)):
                failed.append(name)
    print(f"fuzz: {'failures in ' + ', '.join(failed) if failed else 'nothing found'}")
    return bool(failed)


def _rounds(seconds: int) -> list[int]:
    return [min(ROUND_S, seconds - at) for at in range(0, seconds, ROUND_S)]


def _round(name: str, seconds: int, corpus: str) -> bool:
    command = [sys.executable, __file__, name, "--seconds", str(seconds), "--corpus", corpus]
    return subprocess.run(command, check=False).returncode == 0


def _fuzz(name: str, seconds: int, corpus: str) -> int:
    import atheris

    with atheris.instrument_imports(include=["dataservice"]):
        from fuzz.targets import TARGETS
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-rss_limit_mb=2048",
        "-timeout=10",
        "-print_final_stats=1",
        f"-artifact_prefix={found}/",
        corpus,
    ]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
