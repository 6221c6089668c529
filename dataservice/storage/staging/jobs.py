"""What the jobs that share a cache directory tell each other: needs, next uses and budget.

Invariants: a job's file is locked while the job lives, so what a dead one left is told apart and
removed; files are read and written only while the directory is locked, so none is read half
written; of a job that could not write its file, or whose file is damaged, nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from dataservice.storage.objects import staged_name
from dataservice.storage.staging.locks import is_file_at, open_file, try_lock
from dataservice.storage.staging.needs import Need, Use

_FOLDER = ".jobs-1"
"""The number is of the files' form: jobs of another release are not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """The other live jobs, taken together."""

    num_jobs: int
    budget_bytes: int | None
    """The smallest of theirs; None without one."""
    uses: dict[str, Use]
    """By name of the copy, the soonest use."""


class JobFile:
    """One job's entry, for as long as it is open. Calls need the directory's lock."""

    def __init__(self, cache_dir: str) -> None:
        self._folder = os.path.join(cache_dir, _FOLDER)
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._fd = -1

    def enter(self) -> bool:
        """Makes the entry where it is not there, also because somebody removed it; False where it
        is. Raises OSError."""
        path = os.path.join(self._folder, self.name)
        if self._fd >= 0 and is_file_at(path, self._fd):
            return False
        self._leave()
        os.makedirs(self._folder, exist_ok=True)
        self._fd = open_file(path)
        if not try_lock(self._fd):
            raise BlockingIOError(f"{path} is locked already")
        return True

    def publish(self, budget_bytes: int, needs: Iterable[Need]) -> None:
        """Replace what the others are told. Raises OSError, and they know nothing then."""
        uses = [
            (
                staged_name(need.shard),
                need.next_use,
                need.shard.content_bytes,
                need.copy,
                need.share,
            )
            for need in needs
        ]
        text = memoryview(orjson.dumps({"budget_bytes": budget_bytes, "uses": uses}))
        os.ftruncate(self._fd, 0)
        done = 0
        try:
            while done < len(text):
                done += os.pwrite(self._fd, text[done:], done)
        except OSError:
            os.ftruncate(self._fd, 0)
            raise

    def others(self) -> Others:
        """What the other live jobs need; files of dead ones are removed."""
        budgets: list[int] = []
        uses: dict[str, Use] = {}
        for name in os.listdir(self._folder):
            if name == self.name or (text := self._read(name)) is None:
                continue
            told = _told(text)
            budgets.append(told["budget_bytes"])
            for staged, next_use, size_bytes, copy, share in told["uses"]:
                known = uses.get(staged)
                if known is None or next_use < known.next_use:
                    uses[staged] = Use(
                        next_use=next_use, size_bytes=size_bytes, copy=copy, share=share
                    )
        known_budgets = [budget for budget in budgets if budget is not None]
        return Others(
            num_jobs=len(budgets), budget_bytes=min(known_budgets, default=None), uses=uses
        )

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, self.name))
            self._leave()

    def _leave(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, name: str) -> bytes | None:
        """The content of a live job's file; None when the job is dead."""
        path = os.path.join(self._folder, name)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if try_lock(fd):
                os.unlink(path)
                return None
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)


def _told(text: bytes) -> dict[str, Any]:
    try:
        told: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"budget_bytes": None, "uses": []}
    return told
