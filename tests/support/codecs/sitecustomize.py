"""Pictures that misbehave while they are decoded, by the names of their files, and records that do
while they are rendered, by their keys.

With this folder on PYTHONPATH every process started from then on decodes a picture whose name has
`codec-KIND` in it as KIND says, in a worker and in a decoder process alike; TEST_CODECS is the list
of kinds that do, such as "sleep,abort". A worker that renders the record of the sample
TEST_POISON ends. The product has no switch for it: its functions are replaced when their module is
loaded.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import re
import signal
import sys
import time
from typing import Any


def sleep() -> None:
    """As a decoder that hangs in C."""
    time.sleep(10_000)


def hang() -> None:
    """As one that hangs and lets no other thread run Python."""
    ctypes.PyDLL(None).sleep(10_000)


def abort() -> None:
    os.abort()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def allocate() -> None:
    held = []
    while True:
        held.append(b"\xff" * (16 << 20))


KINDS = {function.__name__: function for function in (sleep, hang, abort, crash, allocate)}


def misbehaving(module: Any) -> None:
    decoder = module.ImageDecoder
    prepare = decoder.prepare

    def prepare_or_else(self: Any, data: bytes, image: Any) -> Any:
        kind = re.search(r"codec-([a-z]+)", image.member)
        if kind is not None and kind[1] in os.environ.get("TEST_CODECS", "").split(","):
            KINDS[kind[1]]()
        return prepare(self, data, image)

    decoder.prepare = prepare_or_else


def poisoned(module: Any) -> None:
    render = module.PackTexts._render_all

    def render_or_end(self: Any, items: Any, holes: Any, *more: Any) -> Any:
        keys = {item.key for item in items} - {key.removesuffix("#record") for key in holes}
        if os.environ.get("TEST_POISON") in keys:
            os.abort()
        return render(self, items, holes, *more)

    module.PackTexts._render_all = render_or_end


CHANGES = {"dataservice.pipeline.images": misbehaving, "dataservice.pipeline.texts": poisoned}


class OnLoad(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        change = CHANGES.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, OnLoad())
