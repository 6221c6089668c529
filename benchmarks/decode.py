"""Decoding and a worker's use of it: candidates, a worker beside a bare loop, scaling, stages.

    python benchmarks/decode.py [--corpus DIR] [--quick] [--only PART ...]

DIR, or the folder that DATASERVICE_CORPUS names, has a folder for each source: NAME.jsonl files,
and NAME.zip files where it has pictures. Without one, a small corpus is made. The parts, each a
module beside this one that says what it measures, run in processes of their own:

    candidates   images/s and MP/s a core by format and size, ours beside other decoders
    service      a worker beside a bare loop, without transport and with it
    scaling      over threads and over processes
    stages       a worker's CPU time by stage
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
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from decode_corpus import make_corpus
from figures import Figure, machine, show, show_reached
from reports import Report

from dataservice.pipeline.images import decoder_fingerprint

PARTS = ("candidates", "service", "scaling", "stages")
LIBRARIES = (
    "numpy",
    "numba",
    "pillow",
    "simplejpeg",
    "imagecodecs",
    "opencv-python-headless",
    "grpcio",
    "zstandard",
    "torch",
)


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def measured(part: str, corpus: Path, quick: bool) -> Report:
    command = [sys.executable, __file__, "--inside", part, "--corpus", str(corpus)]
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command += ["--answer", answer.name, *(["--quick"] if quick else [])]
        subprocess.run(command, check=True)
        found = json.loads(Path(answer.name).read_text())
    return Report(lines=found["lines"], figures=[Figure(**f) for f in found["figures"]])


def inside(part: str, corpus: Path, quick: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="decode-benchmark-") as folder:
        report = importlib.import_module(f"decode_{part}").run(corpus, Path(folder), quick)
    return json.dumps(dataclasses.asdict(report))


def run(corpus: Path, parts: Sequence[str], quick: bool) -> int:
    every: list[Figure] = []
    for part in parts:
        print(f"\n{part}\n{'-' * len(part)}", flush=True)
        report = measured(part, corpus, quick)
        print("\n".join(report.lines), flush=True)
        for figure in report.figures:
            show(figure)
        every += report.figures
    return int(not show_reached(every))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named = os.environ.get("DATASERVICE_CORPUS")
    parser.add_argument("--corpus", type=Path, default=Path(named) if named else None)
    parser.add_argument("--quick", action="store_true", help="rough figures in a few minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        options.answer.write_text(inside(options.inside, options.corpus, options.quick))
        return 0
    print(f"machine:  {machine()}")
    print(f"versions: {versions()}")
    print(f"decoder:  {decoder_fingerprint()}")
    print(f"command:  python benchmarks/decode.py {' '.join(sys.argv[1:])}".rstrip())
    if options.corpus is not None:
        return run(options.corpus.resolve(), options.only, options.quick)
    with tempfile.TemporaryDirectory(prefix="decode-corpus-") as folder:
        print("corpus:   made pictures, which say little of real ones")
        return run(make_corpus(Path(folder) / "corpus"), options.only, options.quick)


if __name__ == "__main__":
    sys.exit(main())
