"""The quarantine file: one JSON object a hole, for people who repair data.

Invariants: the journal decides what a hole is, and this file only tells; within a plan each hole
stands in it once, in the order decided; lines of other plans stay; where it is missing, or lacks a
hole of the journal, that is written anew. That it cannot be written stops nothing.

A line: source, shard (of the record), sample, image (its number in the sample, null: the record
itself), member and archive (where the picture lies, "" for a record), reason, pack (global number),
policy (`errors.bad_image`), plan (the digest's beginning, as `dataservice status` shows it).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from dataservice.actors.holes import Hole, HoleLedger

_LOG = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
PLAN_DIGITS = 12


class Quarantine:
    """Of the holes of `ledger`."""

    def __init__(self, path: Path, ledger: HoleLedger) -> None:
        self.path = path
        self._ledger = ledger
        self._plan = ""

    def start(self, plan_digest: str) -> None:
        """Called once when the ledger holds what the journal has of this plan."""
        self._plan = plan_digest[:PLAN_DIGITS]
        self._complete()

    def add(self, hole: Hole) -> None:
        """The ledger's newest."""
        if not self.path.exists():
            self._complete()
            return
        try:
            self._write([hole])
        except OSError as error:
            self._complain(error)

    def _complete(self) -> None:
        """Adds the holes that the file does not have."""
        try:
            listed = self._listed()
            self._write([h for h in self._ledger.holes() if (h.sample, h.image) not in listed])
        except OSError as error:
            self._complain(error)

    def _write(self, holes: Sequence[Hole]) -> None:
        if not holes:
            return
        lines = "".join(json.dumps(self._object(hole)) + "\n" for hole in holes)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(lines)

    def _object(self, hole: Hole) -> dict[str, str | int | None]:
        return {
            "source": hole.source,
            "shard": hole.shard,
            "sample": hole.sample,
            "image": hole.image,
            "member": hole.member,
            "archive": hole.archive,
            "reason": hole.reason,
            "pack": hole.pack_number,
            "policy": hole.policy,
            "plan": self._plan,
        }

    def _listed(self) -> set[tuple[str, int | None]]:
        """(sample, image) of this plan's holes; an unfinished last line is cut off."""
        listed: set[tuple[str, int | None]] = set()
        if not self.path.exists():
            return listed
        end = 0
        with open(self.path, "r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                end += len(line)
                try:
                    found = json.loads(line)
                    if found["plan"] == self._plan:
                        listed.add((found["sample"], found["image"]))
                except (ValueError, LookupError, TypeError):
                    continue  # somebody's own line
        return listed

    def _complain(self, error: OSError) -> None:
        _LOG.warning("%s cannot be written (%s); the journal has every hole", self.path, error)
