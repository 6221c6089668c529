"""A stager: owns the node's cache directory and copies shards there ahead of need.

Invariants: it decides nothing but what storage.staging decides from the needs it was told; the
worst that its end costs is that packs are read from the origin until the next one is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from dataservice.actors.member import PULL_WAIT_S, Member
from dataservice.config import config_from_json
from dataservice.core.packspec import ShardRef
from dataservice.errors import (
    ConfigError,
)
from dataservice.storage.staging import Need, StagingArea
from dataservice.wire.messages import PullStaging, RegisterStager, ShardNeed, StagerRegistered

_LOG = logging.getLogger(__name__)

IDLE_S = 0.5
MAX_STAGERS_A_HOST = 64


def open_area(config_json: str) -> StagingArea:
    """The first subdirectory of the cache directory that no other stager of this host owns."""
    staging = config_from_json(config_json).staging
    if staging.cache_dir is None:
        raise ConfigError("staging.cache_dir is not set: there is nothing to own")
    for slot in range(MAX_STAGERS_A_HOST):
        try:
            return StagingArea(
                str(Path(staging.cache_dir) / str(slot)),
                budget_bytes=staging.budget_bytes,
                deadline_s=staging.deadline_s,
            )
        except BlockingIOError:
            continue
    raise ConfigError(
        f"staging.cache_dir = {staging.cache_dir}: {MAX_STAGERS_A_HOST} stagers use it already"
    )


class Stager:
    """`run()` copies until stopped or orphaned."""

    def __init__(self, *, coordinator: str, node: str, host: str, config_json: str) -> None:
        self.node = node
        self._host = host
        self._area = open_area(config_json)
        self._lease = 0
        self._version = -1
        self._stopping = threading.Event()
        self._member = Member(
            coordinator, hello=self._hello, joined=self._joined, stopping=self._stopping.is_set
        )
        self._news = threading.Event()

    async def run(self) -> None:
        copier = threading.Thread(target=self._copy_loop, name="stager-copy")
        copier.start()
        try:
            async for staging in self._member.answers(self._pull_request):
                self._version = staging.version
                if staging.needs is not None:
                    self._area.update([_need(need) for need in staging.needs])
                    self._news.set()
        finally:
            self.stop()
            self._news.set()
            await self._member.close()
            await asyncio.to_thread(copier.join, 30.0)
            self._area.close()

    def stop(self) -> None:
        """May be called from any thread."""
        self._stopping.set()
        self._area.stop()

    def _hello(self) -> RegisterStager:
        return RegisterStager(
            node=self.node,
            host=self._host,
            cache_dir=self._area.cache_dir,
            budget_bytes=self._area.budget_bytes,
        )

    def _joined(self, seat: StagerRegistered) -> None:
        self._lease, self._version = seat.lease, -1

    def _pull_request(self) -> PullStaging:
        area = self._area
        return PullStaging(
            node=self.node,
            lease=self._lease,
            version=self._version,
            wait_s=PULL_WAIT_S,
            cached_bytes=area.cached_bytes,
            cached_shards=area.cached_shards,
            copied_bytes=area.copied_bytes,
            evictions=area.evictions,
            errors=area.errors,
        )

    def _copy_loop(self) -> None:
        while not self._stopping.is_set():
            self._news.clear()
            try:
                busy = self._area.step()
            except Exception:
                _LOG.exception("staging failed; packs are read from their origin meanwhile")
                busy = False
            if not busy:
                self._news.wait(IDLE_S)


def _need(need: ShardNeed) -> Need:
    return Need(
        shard=ShardRef(
            source=need.source,
            name=need.name,
            url=need.url,
            size_bytes=need.size_bytes,
            mtime_ns=need.mtime_ns,
        ),
        crc32=need.crc32,
        next_use=need.next_use,
    )
