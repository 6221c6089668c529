"""What building an index says: how far it is, and what came of it.

Invariants: rejected records are a stream from file to file, whatever their number.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from dataservice.storage.index_shard import RejectedRecord, ShardResult
from dataservice.storage.index_tasks import Running
from dataservice.storage.tables import write_atomically

_LOG = logging.getLogger(__name__)

REJECTED_NAME = "rejected.jsonl"
_MAX_EXAMPLES = 20
_MAX_WARNINGS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexProgress:
    """Bytes are of record files, those that need no reading included."""

    done_bytes: int
    total_bytes: int
    num_samples: int
    """Good ones and rejected ones."""
    num_rejected: int
    shard: str


Progress = Callable[[IndexProgress], None]
"""Called often; draws or logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    name: str
    num_samples: int
    """Rows, those of rejected records included."""
    num_rejected: int
    num_images: int
    text_tokens: int
    loss_tokens: int
    shards_read: int
    shards_reused: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexReport:
    digest: str
    sources: tuple[SourceReport, ...]
    rejected_path: str
    """A JSONL file with one line for every record that cannot be used."""
    examples: tuple[RejectedRecord, ...]
    """The first of them."""
    unread: tuple[str, ...]
    """Of each record file that was not read to its end: its URL, and what is lost and why. Each
    counts as one rejected record, however many are behind it."""

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def num_rejected(self) -> int:
        return sum(source.num_rejected for source in self.sources)


class ProgressCounter:
    """Adds up what tasks say that run side by side."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._done = (0, 0, 0)
        self._running: dict[int, tuple[int, int, int]] = {}

    def running(self, state: Running, shard: str) -> None:
        self._running[state.number] = state.done_bytes, state.num_samples, state.num_rejected
        self._show(shard)

    def finished(self, number: int | None, size_bytes: int, result: ShardResult) -> None:
        """`number` is that of the task, None for a shard that needed none."""
        if number is not None:
            self._running.pop(number, None)
        entry = result.entry
        more = size_bytes, entry.num_samples, entry.num_rejected
        self._done = _sum(self._done, more)
        self._show(entry.name)

    def _show(self, shard: str) -> None:
        if self._progress is None:
            return
        done_bytes, num_samples, num_rejected = self._done
        for state in self._running.values():
            done_bytes, num_samples, num_rejected = _sum(
                (done_bytes, num_samples, num_rejected), state
            )
        self._progress(
            IndexProgress(
                done_bytes=done_bytes,
                total_bytes=self._total_bytes,
                num_samples=num_samples,
                num_rejected=num_rejected,
                shard=shard,
            )
        )


def report_of(
    index_dir: str,
    digest: str,
    shards: Sequence[tuple[str, Sequence[ShardResult]]],
) -> IndexReport:
    """`shards` by source name."""
    path = os.path.join(index_dir, REJECTED_NAME)
    examples = []
    with open(path, encoding="utf-8") as file:
        for _, line in zip(range(_MAX_EXAMPLES), file, strict=False):
            examples.append(RejectedRecord(**json.loads(line)))
    unread = tuple(
        f"{shard.entry.url}: {shard.unread}"
        for _, results in shards
        for shard in results
        if shard.unread
    )
    _warn(unread)
    return IndexReport(
        digest=digest,
        sources=tuple(_of_source(name, results) for name, results in shards),
        rejected_path=path,
        examples=tuple(examples),
        unread=unread,
    )


def _warn(unread: Sequence[str]) -> None:
    if unread:
        more = f"; and {len(unread) - _MAX_WARNINGS} more" if unread[_MAX_WARNINGS:] else ""
        _LOG.warning(
            "%d record file(s) not read to the end; all that is lost of one counts as one rejected "
            "record: %s%s",
            len(unread),
            "; ".join(unread[:_MAX_WARNINGS]),
            more,
        )


def write_rejected(index_dir: str, shards: Sequence[ShardResult]) -> None:
    def write(file: BinaryIO) -> None:
        for shard in shards:
            with open(shard.rejected_path, "rb") as rejected:
                shutil.copyfileobj(rejected, file)

    write_atomically(os.path.join(index_dir, REJECTED_NAME), write)


def _of_source(name: str, shards: Sequence[ShardResult]) -> SourceReport:
    entries = [shard.entry for shard in shards]
    reused = sum(shard.reused for shard in shards)
    return SourceReport(
        name=name,
        num_samples=sum(entry.num_samples for entry in entries),
        num_rejected=sum(entry.num_rejected for entry in entries),
        num_images=sum(entry.num_images for entry in entries),
        text_tokens=sum(entry.text_tokens for entry in entries),
        loss_tokens=sum(entry.loss_tokens for entry in entries),
        shards_read=len(shards) - reused,
        shards_reused=reused,
    )


def _sum(some: tuple[int, int, int], more: tuple[int, int, int]) -> tuple[int, int, int]:
    return some[0] + more[0], some[1] + more[1], some[2] + more[2]
