"""A store behind a latency for every process of the service: "slow://" and a local path.

fsspec finds it by its entry point, so nothing of the service knows of it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

LATENCY = "SLOW_STORE_S"
"""Environment variable with the seconds that each read takes."""
MODULE = """
import os
import time

from fsspec.implementations.local import LocalFileSystem


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
        time.sleep(float(os.environ["SLOW_STORE_S"]))
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))
"""


def install(folder: Path) -> None:
    """For this process and those that it starts, without latency for now."""
    info = folder / "slow_store_fs-0.dist-info"
    info.mkdir(parents=True)
    (folder / "slow_store_fs.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-store-fs\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_store_fs:SlowFileSystem\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), LATENCY: "0"}
    sys.path.insert(0, str(folder))
    import fsspec

    slow = importlib.import_module("slow_store_fs").SlowFileSystem
    fsspec.register_implementation("slow", slow, clobber=True)
