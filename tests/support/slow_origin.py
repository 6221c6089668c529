"""Makes "slow://" a file system of fsspec in every process of a test: local files behind a latency,
with failures while a file says so.

fsspec finds it by its entry point, so nothing of the service knows of it.
"""

import os
import sys
from pathlib import Path

_MODULE = """
import json
import os
import random
import time

from fsspec.implementations.local import LocalFileSystem


def _trouble():
    try:
        with open(os.environ.get("ORIGIN_TROUBLE", "")) as file:
            trouble = json.load(file)
    except OSError:
        return
    if random.random() < trouble["share"]:
        time.sleep(trouble["delay_s"])
        if trouble["errno"]:
            raise OSError(trouble["errno"], os.strerror(trouble["errno"]))


class SlowFileSystem(LocalFileSystem):
    protocol = ("slow",)

    @classmethod
    def _strip_protocol(cls, path):
        path = os.fspath(path) if not isinstance(path, list) else path
        if isinstance(path, str) and path.startswith("slow://"):
            path = path[len("slow://"):]
        return LocalFileSystem._strip_protocol(path)

    def unstrip_protocol(self, name):
        return "slow://" + self._strip_protocol(name)

    def cat_file(self, path, start=None, end=None, **kwargs):
        time.sleep(float(os.environ["SLOW_ORIGIN_S"]))
        _trouble()
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))
"""


def install(folder: Path, *, latency_s: float, trouble: Path | None = None) -> dict[str, str]:
    """Writes the package into `folder`; the environment that makes processes see it.

    While the file `trouble` is there, `{"share": 0.5, "delay_s": 1.0, "errno": 5}` in it says which
    share of reads is later by so much, and then fails so (0: does not).
    """
    info = folder / "slow_origin_fs-0.dist-info"
    info.mkdir(parents=True)
    (folder / "slow_origin_fs.py").write_text(_MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-origin-fs\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_origin_fs:SlowFileSystem\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SLOW_ORIGIN_S": str(latency_s),
        "ORIGIN_TROUBLE": "" if trouble is None else str(trouble),
    }


def activate_here(folder: Path) -> None:
    """For this process, which has scanned its entry points already."""
    import fsspec

    sys.path.insert(0, str(folder))
    from slow_origin_fs import SlowFileSystem

    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
