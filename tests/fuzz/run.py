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


def main() -> int:
    sys.path.insert(0, str(HERE.parent))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=300, help="for each target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _fuzz(options.targets[0], options.seconds)
    from fuzz.targets import TARGETS

    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown target {unknown[0]}; known: {', '.join(TARGETS)}")
    failed = []
    for name in options.targets or TARGETS:
        command = [sys.executable, __file__, name, "--seconds", str(options.seconds), "--inside"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"fuzz: {'failures in ' + ', '.join(failed) if failed else 'nothing found'}")
    return bool(failed)


def _fuzz(name: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["dataservice"]):
        from fuzz.targets import SEEDS, TARGETS
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as corpus:
        for number, seed in enumerate(SEEDS[name]):
            Path(corpus, f"seed-{number}").write_bytes(seed)
        arguments = [
            sys.argv[0],
            f"-max_total_time={seconds}",
            "-max_len=8192",
            "-rss_limit_mb=1024",
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
