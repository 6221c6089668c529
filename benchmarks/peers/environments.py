"""The Python environment of the peers, made once, and what the corpus is converted to in it.

Invariants: our own environment is never changed; decoders have the same versions in both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PEERS = {
    "torch": "2.13.0",
    "webdataset": "1.0.2",
    "mosaicml-streaming": "0.13.0",
    "megatron-energon": "7.4.1",
    "spdl": "0.8.0",
}
DECODERS = ("pillow", "simplejpeg", "imagecodecs", "numba")
READERS = (
    "numpy",
    "msgspec",
    "msgpack",
    "orjson",
    "xxhash",
    "isal",
    "zlib-ng",
    "inflate64",
    "zstandard",
    "fsspec",
    "pyyaml",
    "jinja2",
)
"""What reading records needs besides, in the versions that the peers have or allow."""
BENCHMARKS = Path(__file__).resolve().parent.parent


def pins() -> list[str]:
    exact = PEERS | {name: version(name) for name in DECODERS}
    return [f"{name}=={number}" for name, number in exact.items()]


def peers_python(work: Path) -> Path:
    return work / "venv" / "bin" / "python"


def make(work: Path) -> None:
    """Below `work`; minutes long the first time."""
    stamp, wanted = work / "venv" / "pins.txt", "\n".join(pins())
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making the peers' environment in {work / 'venv'} (minutes)", file=sys.stderr)
    shutil.rmtree(work / "venv", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(work / "venv")], check=True)
    pip = [str(peers_python(work)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *pins()], check=True)
    subprocess.run([*pip, *READERS], check=True)
    stamp.write_text(wanted)


def environment() -> dict[str, str]:
    """Of every run: one thread a process beside those that a loader starts on purpose."""
    return os.environ | {
        "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{BENCHMARKS.parent}",
        "OMP_NUM_THREADS": "1",
    }


def convert(work: Path, form: str, mixed: Path, target: Path) -> None:
    """Has `peers.convert` write to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    command = [str(peers_python(work)), "-m", "peers.convert", form, str(mixed), str(target)]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)


def warm(work: Path) -> None:
    """Has both environments compile what is compiled at first use."""
    for python in (sys.executable, str(peers_python(work))):
        subprocess.run([python, "-m", "peers.warm"], check=True, env=environment())


def peer_versions(work: Path) -> str:
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    command = [str(peers_python(work)), "-c", code, *PEERS]
    numbers = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return ", ".join(f"{n} {v}" for n, v in zip(PEERS, numbers, strict=True))
