"""Who makes the specs of windows' packs: the planning process itself, or helpers of it.

Invariants: both make the same; helpers are started by the first step that is large enough, are as
many as leave the machine's cores to others, end with the planning process however that ends, and
one that ends before its time costs a step nothing but time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

from dataservice.actors.excluding import excluded_holes
from dataservice.actors.pack_specs import packed_spec, sample_marks
from dataservice.core.tables import WindowPlan
from dataservice.core.vision import VisionRules
from dataservice.storage.index import Index
from dataservice.storage.index_executor import helper_starts

_LOG = logging.getLogger(__name__)

LARGE_STEP = 32_768
"""Packs; one process makes some 6,000 a second."""
CORES_A_HELPER, MOST_HELPERS = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Of some packs of a window, in the order asked for."""

    packed: list[bytes]
    """`pack_specs.packed_spec`."""
    marks: list[list[int]]
    """`pack_specs.sample_marks`."""
    excluded: dict[str, tuple[str, ...]]
    """Pack id -> hole keys of its samples that are left out on purpose."""
    num_excluded: int


Job = tuple[WindowPlan, list[int]]
"""A window, and numbers of packs in it."""


def make(index: Index, rules: VisionRules, excluded: Collection[str], job: Job) -> Made:
    """`excluded`: keys of samples."""
    window, numbers = job
    specs = index.pack_specs(window, numbers, rules=rules)
    holes, num_excluded = excluded_holes(specs, excluded)
    return Made(
        packed=[packed_spec(spec) for spec in specs],
        marks=[sample_marks(spec) for spec in specs],
        excluded=holes,
        num_excluded=num_excluded,
    )


class SpecMakers:
    def __init__(self, index: Index, rules: VisionRules, *, helpers: int | None = None) -> None:
        """`helpers`: how many may be started, None: by the cores that this process may use. They
        open the index on their own, so it must be a full one."""
        self._index = index
        self._rules = rules
        cores = len(os.sched_getaffinity(0))
        self._most = min(MOST_HELPERS, cores // CORES_A_HELPER) if helpers is None else helpers
        self._pool: ProcessPoolExecutor | None = None

    def made(self, jobs: Sequence[Job], excluded: Collection[str]) -> Iterator[Made]:
        """In the order of the jobs."""
        done = 0
        if self._most and sum(len(numbers) for _, numbers in jobs) >= LARGE_STEP:
            try:
                for one in self._helpers().map(partial(_help, self._rules, excluded), jobs):
                    done += 1
                    yield one
                return
            except BrokenProcessPool as error:
                _LOG.warning("helpers of the planning process ended (%s): it goes on alone", error)
                self.close()
        for job in jobs[done:]:
            yield make(self._index, self._rules, excluded, job)

    def _helpers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._most,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(self._index.index_dir,),
            )
        return self._pool

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


_INDEX_OF_PROCESS: list[Index] = []
"""Of a helper; it ends with the process."""


def _start(index_dir: str) -> None:
    helper_starts()
    _INDEX_OF_PROCESS.append(Index.open(index_dir))


def _help(rules: VisionRules, excluded: Collection[str], job: Job) -> Made:
    return make(_INDEX_OF_PROCESS[0], rules, excluded, job)
