"""Local files as a script lets them be read: late, failing, cut short, or another than they are.

Invariants: only what lies in the folder of the origin is scripted; the script is asked before every
stat and read of a file, in whatever thread that happens.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dataservice.storage import objects
from dataservice.storage.backends import LocalBackend, ObjectStat

Script = Callable[[str, str, int], object]
"""(call: "stat" or "read", name of the file, how many such calls there were before) -> None, or
CUT or OLD; it may raise, or take its time."""
CUT = "half of the bytes come"
OLD = "it is what it was a minute ago"


class ScriptedOrigin:
    """Takes the place of local storage in this process until `monkeypatch` is undone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, script: Script) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """(call, name of the file)."""
        lock = threading.Lock()
        inside = f"{folder}/"

        def ask(call: str, url: str) -> object:
            if not url.startswith(inside):
                return None
            name = Path(url).name
            with lock:
                before = self.calls[call, name]
                self.calls[call, name] += 1
            return script(call, name, before)

        class Backend(LocalBackend):
            def stat(self, url: str) -> ObjectStat:
                answer = ask("stat", url)
                found = super().stat(url)
                return _old(found) if answer is OLD else found

            def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
                answer = ask("read", url)
                data, stat = super().read(url, offset, size)
                if answer is CUT:
                    data = data[: size // 2]
                return data, _old(stat) if answer is OLD else stat

            def read_cached(
                self, url: str, offset: int, size: int
            ) -> tuple[bytes, ObjectStat] | None:
                return None if url.startswith(inside) else super().read_cached(url, offset, size)

        monkeypatch.setattr(objects, "LocalBackend", Backend)

    def reads(self, name: str = "") -> int:
        """Of one file, or of all."""
        return sum(n for (call, of), n in self.calls.items() if call == "read" and name in ("", of))


def _old(stat: ObjectStat) -> ObjectStat:
    return dataclasses.replace(stat, mtime_ns=stat.mtime_ns - 60 * 10**9)
