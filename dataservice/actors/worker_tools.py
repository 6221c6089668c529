"""What a worker's config decides: its reader, decoders, threads and queue, as one thing to close.

Invariants: the worker makes it once the coordinator has told it the config, and closes it; packs
come out the same whichever way their pictures are decoded; memory held for isolated decoding stays
within half of the worker's bound, except that one decoder process may always run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from dataservice.actors.build_queue import BuildQueue, Job
from dataservice.actors.count_thread import CountThread
from dataservice.actors.step_specs import padding_spec
from dataservice.config import Config
from dataservice.core.fleet import decode_threads
from dataservice.core.packspec import PackSpec, padding_id
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.isolation import IsolatedDecoder, picture_memory
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools, DeadlinePool
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.objects import ShardReader
from dataservice.wire.encoded import EncodedPack

_LOG = logging.getLogger(__name__)

IDLE_S = 30.0
"""A decoder process without a suspect picture for so long is ended, and shared memory for a client
that asks for no pack is given up."""


def encoded(built: BuiltPack) -> EncodedPack:
    """The pack as it is held until somebody fetches it."""
    return EncodedPack(built.arrays, built.meta)


class WorkerTools:
    """Thread-safe."""

    def __init__(
        self,
        config: Config,
        on_change: Callable[[], None],
        ask: Callable[[object], Any],
        seat: Callable[[], tuple[str, int]],
    ) -> None:
        self.config = config
        workers, vision = config.workers, config.plan.vision
        self.patch_bytes = vision.patch_bytes
        self.renderer = TextRenderer.build(config.text)
        self.formats = {source.name: source.format for source in config.sources}
        self.reader = ShardReader(
            None, deadline_s=config.staging.deadline_s, retries=config.staging.retries
        )
        self.limits = DecodeLimits(
            deadline_s=workers.decode_deadline_s,
            max_pixels=workers.max_image_pixels,
            max_bytes=workers.max_image_bytes,
        )
        self.decoder = ImageDecoder(vision, self.limits)
        picture_bytes = picture_memory(workers.max_image_pixels, workers.max_image_bytes)
        self.isolated = IsolatedDecoder(vision, self.limits, memory_bytes=picture_bytes)
        self.decode_threads = workers.decode_threads or decode_threads(len(os.sched_getaffinity(0)))
        self.pools = BuildPools(decode_threads=self.decode_threads)
        self._isolated_pools = self.pools.beside(
            isolated_threads(self.decode_threads, workers.memory_bytes, picture_bytes),
            name="isolated",
        )
        self._isolated_limits = dataclasses.replace(self.limits, deadline_s=self.isolated.longest_s)
        self.counting: CountThread | None = None
        if config.index == "lazy":
            self.counting = CountThread(config, self.renderer, self.reader, ask, seat)
        self.queue = BuildQueue(ready_bytes_bound=workers.ready_bytes, on_change=on_change)
        plan = self.config.plan
        lengths = {plan.pack_length, *(phase.pack_length or 0 for phase in plan.phases)} - {0}
        self._padding_specs = {padding_id(n): padding_spec(n) for n in lengths}
        self._padding: dict[str, EncodedPack] = {}
        self.closed = False

    def build(self, job: Job, holes: dict[str, str]) -> BuiltPack:
        """As `build_pack`; a suspect pack's pictures are decoded in processes of their own, and
        so are those of a pack for which memory ran out here, whosever picture took it."""
        if not job.isolated:
            try:
                return self._build(job.spec, holes, job.storage_holes, job.need, isolated=False)
            except MemoryError:
                _LOG.warning("pack %s: out of memory; its pictures are suspect", job.pack_id)
        return self._build(job.spec, holes, job.storage_holes, job.need, isolated=True)

    def _build(
        self,
        spec: PackSpec,
        holes: dict[str, str],
        storage_holes: bool,
        need: tuple[int, ...],
        *,
        isolated: bool,
    ) -> BuiltPack:
        return build_pack(
            spec,
            reader=self.reader,
            renderer=self.renderer,
            formats=self.formats,
            rules=self.config.plan.vision,
            holes=holes,
            storage_holes=storage_holes,
            bad_image="fallback" if self.config.errors.bad_image == "fallback" else "hole",
            decoder=self.isolated if isolated else self.decoder,
            limits=self._isolated_limits if isolated else self.limits,
            pool=self._isolated_pools if isolated else self.pools,
            need=need,
        )

    @property
    def decode_s(self) -> float:
        """Spent in decoding, over all threads."""
        return self.pools.decodes.busy_s + self._isolated_pools.decodes.busy_s

    @property
    def decode_pools(self) -> dict[str, DeadlinePool]:
        """By how pictures are decoded in them."""
        return {"picture": self.pools.decodes, "isolated": self._isolated_pools.decodes}

    @property
    def stuck_decodes(self) -> int:
        return self.pools.decodes.stuck

    def padding_pack(self, pack_id: str) -> EncodedPack | None:
        """None for what is no padding pack of the plan."""
        if pack_id in self._padding_specs and pack_id not in self._padding:
            built = self._build(self._padding_specs[pack_id], {}, False, (), isolated=False)
            self._padding[pack_id] = encoded(built)
        return self._padding.get(pack_id)

    def close(self) -> None:
        self.closed = True
        self.queue.close()
        if self.counting is not None:
            self.counting.close()
        self.isolated.close()
        self.pools.close()
        self._isolated_pools.close()
        self.reader.close()


def isolated_threads(decode_threads: int, memory_bytes: int | None, picture_bytes: int) -> int:
    """How many decoder processes a worker may run at once."""
    if memory_bytes is None:
        return decode_threads
    return max(1, min(decode_threads, memory_bytes // 2 // picture_bytes))
