"""A stager: copies shards to the node's cache directory ahead of need, for one job.

Invariants: it decides nothing but what storage.staging decides from the needs it was told; the
worst that its end costs is that packs are read from the origin until the next one is there; stagers
of other jobs may share the directory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from typing import TYPE_CHECKING

from dataservice.actors.member import PULL_WAIT_S, Member
from dataservice.actors.shard_messages import ref_of
from dataservice.config import config_from_json
from dataservice.errors import ConfigError
from dataservice.rpc.security import ClientSecurity
from dataservice.storage.staging import Copiers, Need, StagingArea
from dataservice.wire.staging import PullStaging, RegisterStager, ShardNeed, StagerRegistered

if TYPE_CHECKING:
    from dataservice.actors.member_metrics import MemberMetrics
    from dataservice.obs.metrics import Sheet

START_SPREAD_S = 1.0
"""Over which the stagers of a cluster that starts begin to copy, so that its origin is not asked by
all of them at once."""


def open_area(config_json: str) -> StagingArea:
    """The cache directory of the node, as configured."""
    staging = config_from_json(config_json).staging
    if staging.cache_dir is None:
        raise ConfigError("staging.cache_dir is not set: there is nothing to stage to")
    return StagingArea(
        staging.cache_dir,
        budget_bytes=staging.budget_bytes,
        deadline_s=staging.deadline_s,
        streams=staging.copy_streams,
        max_bytes_per_s=staging.max_bytes_per_s,
        start_after_s=random.uniform(0.0, START_SPREAD_S),
    )


class Stager:
    """`run()` copies until stopped or orphaned."""

    def __init__(
        self,
        *,
        coordinator: str,
        node: str,
        host: str,
        config_json: str,
        advertise: str | None = None,
    ) -> None:
        """`advertise`: where others reach its metrics, if it is not at `serving.host`."""
        self.node = node
        self._host = host
        self._config = config_from_json(config_json)
        self._area = open_area(config_json)
        self._advertise = advertise
        self._metrics: MemberMetrics | None = None
        self._started_s = time.time()
        security = self._config.serving.security
        self._lease = 0
        self._version = -1
        self._stopping = threading.Event()
        self._member = Member(
            coordinator,
            security=ClientSecurity.of_member(security),
            hello=self._hello,
            joined=self._joined,
            stopping=self._stopping.is_set,
        )

    async def run(self) -> None:
        copiers = Copiers(self._area)
        try:
            if self._config.serving.http_port is not None:
                self._metrics = await self._start_metrics()
            async for staging in self._member.answers(self._pull_request):
                self._version = staging.version
                if staging.needs is not None:
                    self._area.update([_need(need) for need in staging.needs])
        finally:
            self.stop()
            await self._member.close()
            if self._metrics is not None:
                await self._metrics.stop()
            await asyncio.to_thread(copiers.close)
            self._area.close()

    def stop(self) -> None:
        """May be called from any thread."""
        self._stopping.set()
        self._area.stop()

    async def _start_metrics(self) -> MemberMetrics:
        from dataservice.actors.member_metrics import member_sheet, put_stager, start_metrics

        config = self._config

        def sheet() -> Sheet:
            found = member_sheet("stager", job=config.job, started_s=self._started_s)
            put_stager(found, self._area)
            return found

        return await start_metrics(
            sheet,
            host=config.serving.host,
            advertise=self._advertise,
            security=config.serving.security,
        )

    def _hello(self) -> RegisterStager:
        return RegisterStager(
            node=self.node,
            host=self._host,
            cache_dir=self._area.cache_dir,
            budget_bytes=self._area.budget_bytes,
            metrics="" if self._metrics is None else self._metrics.address,
        )

    def _joined(self, seat: StagerRegistered) -> None:
        self._lease, self._version = seat.lease, -1

    def _pull_request(self) -> PullStaging:
        return PullStaging(
            node=self.node,
            lease=self._lease,
            version=self._version,
            wait_s=PULL_WAIT_S,
            **dataclasses.asdict(self._area.figures()),
        )


def _need(need: ShardNeed) -> Need:
    return Need(
        shard=ref_of(need.shard),
        crc32=need.crc32,
        next_use=need.next_use,
        copy=need.copy,
        share=need.share,
    )
