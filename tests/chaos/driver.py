"""Runs a training job for a while and breaks it at random, then proves that nothing came of it.

Invariants: the trainers start anew from their last common saved state whenever one of them is
killed, now and then with another DP size; a step that takes longer than BOUND_S, a process that
ends by an error of its own, and a pack that is missing, doubled or different are violations.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.faults import Fault, draw_faults
from chaos.history import (
    Proof,
    Run,
    first_batches,
    longest_stand,
    packs_by_number,
    prove,
)
from chaos.job import JOB, MICRO_STEPS, make_job, undisturbed
from chaos.targets import Targets
from support import small_disk
from support.rank_processes import RankProcesses

from dataservice.errors import DataServiceError

FIRST_DP_SIZE = 4
SAVE_EVERY = 3
PAUSE_S = 0.1
"""A trainer's work on a micro-batch."""
BOUND_S = 90.0
"""Longest that a trainer may wait for a micro-batch, whatever happens. A half-open connection alone
is noticed after up to 30 s."""
TIMEOUT_S = 150.0
"""The trainers' own."""
CALM_STEPS = 5
"""That every rank has to take once the faults are over."""
EFFECT_S = 10.0
"""A fault is held responsible for waits that begin so much later at most."""
DISK_BYTES = 24 << 20
TICK_S = 0.05
SAMPLE_EVERY_S = 5.0
STATUS_S = 1.0
STOP_S = 30.0
UNDISTURBED_S = 1800.0
ORDERLY_CODES = (0, -signal.SIGKILL, -signal.SIGTERM)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    name: str
    whom: str
    at: float
    run: int
    restarts: bool


@dataclass(kw_only=True)
class Result:
    """What a chaos run found; times in seconds, memory in bytes."""

    seconds: float
    struck: list[Struck]
    left_out: dict[str, str]
    """Kinds of faults that cannot be had here, with the reason."""
    recoveries: dict[str, list[float]]
    """By kind of fault."""
    starts: int
    dp_sizes: Counter[int]
    exits: Counter[tuple[str, int]]
    memory: list[dict[str, int]]
    counters: Counter[str]
    """Of all coordinators together, as far as they told."""
    proof: Proof
    violations: list[str] = field(default_factory=list)


class Stuck(Exception):
    """Nobody got anything for too long."""


class Chaos:
    def __init__(self, folder: Path, *, seconds: float, seed: int, say: Say) -> None:
        self._folder, self._seconds, self._seed, self._say = folder, seconds, seed, say
        self._struck: list[Struck] = []
        self._runs: list[tuple[int, RankProcesses]] = []
        """First step, and the ranks."""
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._violations: list[str] = []
        self._memory: list[dict[str, int]] = []
        self._states: Path | None = None
        self._watch = _Watch()
        self._counters: Counter[str] = Counter()
        self._told: dict[str, int] = {}
        """Counters of the present coordinator."""

    def run(self) -> Result:
        cache_dir = self._folder / "cache"
        with small_disk.small_disk(cache_dir, size_bytes=DISK_BYTES) as mounted:
            left_out = {} if mounted else {"disk full": "mounting is not permitted here"}
            job = make_job(self._folder, cache_dir=cache_dir, seed=self._seed)
            self._targets = Targets(job, self._folder / "service")
            began = time.monotonic()
            try:
                self._storm(frozenset(left_out))
                self._calm()
            except Stuck as error:
                self._violations.append(str(error))
            finally:
                self._targets.close()
            seconds = time.monotonic() - began
        runs = [
            Run(
                first_step=first,
                dp_size=ranks.dp_size,
                micro_steps=MICRO_STEPS,
                deliveries=ranks.deliveries(),
            )
            for first, ranks in self._runs
        ]
        return self._result(runs, job, seconds, left_out)

    # ---- faults ----------------------------------------------------------------------------------

    def _storm(self, without: frozenset[str]) -> None:
        self._start(FIRST_DP_SIZE)
        self._wait_for_progress(1)  # the first step is not disturbed
        end = time.monotonic() + self._seconds
        faults = draw_faults(self._seed, without=without)
        fault = next(faults)
        due = time.monotonic() + fault.after_s
        next_sample = 0.0
        while (now := time.monotonic()) < end:
            self._undo_what_is_due(now)
            self._check_ranks(fault.dp_size)
            if now >= due:
                self._strike(fault)
                fault = next(faults)
                due = now + fault.after_s
            if now >= next_sample:
                self._sample()
                next_sample = now + SAMPLE_EVERY_S
            self._watch_progress()
            time.sleep(TICK_S)

    def _strike(self, fault: Fault) -> None:
        at = time.monotonic()
        whom, undo = self._targets.strike(fault)
        struck = Struck(
            name=fault.kind.name,
            whom=whom,
            at=at,
            run=len(self._runs) - 1,
            restarts=fault.kind.restarts,
        )
        self._struck.append(struck)
        lasts = f" for {fault.lasts_s:.1f} s" if undo is not None else ""
        self._say(f"{fault.kind.name}: {whom}{lasts}")
        if undo is not None:
            self._undo.append((at + fault.lasts_s, undo))
        if fault.kind.restarts:
            time.sleep(fault.amount)  # before the launcher of a real job notices
            self._restart(fault.dp_size)

    def _undo_what_is_due(self, now: float) -> None:
        for entry in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(entry)
            entry[1]()

    def _check_ranks(self, dp_size: int) -> None:
        """A rank that ended without having been told to."""
        ranks = self._ranks
        if ranks.codes:
            code = dict(ranks.codes)
            self._violations.append(f"run {len(self._runs) - 1}: {code}: {ranks.errors}")
            self._say(self._violations[-1])
            self._restart(dp_size)

    def _watch_progress(self) -> None:
        sizes = sum(path.stat().st_size for path in self._ranks.folder.glob("rank-*.jsonl"))
        if self._watch.stands_s(sizes, self._ranks) > BOUND_S:
            raise Stuck(f"no rank got anything for {BOUND_S:g} s; {self._state_in_words()}")

    def _sample(self) -> None:
        self._memory.append(self._targets.memory())
        try:
            told = self._targets.service.status(STATUS_S)["counters"]
        except (DataServiceError, KeyError):
            return  # it is stopped, or opens its index
        before = self._told if all(told.get(n, 0) >= v for n, v in self._told.items()) else {}
        for name, value in told.items():
            self._counters[name] += value - before.get(name, 0)
        self._told = told

    def _state_in_words(self) -> str:
        try:
            return json.dumps(self._targets.service.status())[:4000]
        except Exception as error:
            return f"no status: {error}"

    # ---- trainers --------------------------------------------------------------------------------

    @property
    def _ranks(self) -> RankProcesses:
        return self._runs[-1][1]

    def _start(self, dp_size: int) -> None:
        step = int(self._states.name.removeprefix("step-")) if self._states is not None else 0
        number = len(self._runs)
        self._say(f"run {number}: DP {dp_size} from step {step}")
        ranks = RankProcesses(
            self._targets.service.endpoint,
            self._folder / f"run-{number}",
            job=JOB,
            dp_size=dp_size,
            micro_steps=MICRO_STEPS,
            steps=None,
            states=self._states,
            save_every=SAVE_EVERY,
            pause_s=PAUSE_S,
            timeout_s=TIMEOUT_S,
            endpoints={r: self._targets.coordinator_of_rank(r) for r in range(dp_size)},
            grpc_ranks=range(1, dp_size, 2),
            prefetch_packs=None,
        )
        self._runs.append((step, ranks))
        self._targets.ranks = ranks

    def _restart(self, dp_size: int) -> None:
        self._ranks.close()
        self._states = self._ranks.last_state() or self._states
        self._start(dp_size)

    def _wait_for_progress(self, steps: int) -> None:
        """Until every rank has got so many more steps."""
        ranks = self._ranks
        lines = [_lines(ranks, rank) + steps * MICRO_STEPS for rank in range(ranks.dp_size)]
        until = time.monotonic() + BOUND_S
        while any(_lines(ranks, rank) < lines[rank] for rank in range(ranks.dp_size)):
            self._undo_what_is_due(time.monotonic())
            if ranks.codes or time.monotonic() > until:
                raise Stuck(
                    f"{steps} steps undisturbed took longer than {BOUND_S:g} s or failed: "
                    f"{ranks.codes} {ranks.errors}; {self._state_in_words()}"
                )
            time.sleep(TICK_S)

    def _calm(self) -> None:
        """No more faults: whatever lasts is over, all ranks go on, then they are told to end."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        self._check_ranks(FIRST_DP_SIZE)
        self._wait_for_progress(CALM_STEPS)
        self._sample()
        for rank in range(self._ranks.dp_size):
            self._ranks.signal(rank, signal.SIGTERM)
        self._ranks.wait(STOP_S)

    # ---- result ----------------------------------------------------------------------------------

    def _result(
        self,
        runs: list[Run],
        job: Any,
        seconds: float,
        left_out: dict[str, str],
    ) -> Result:
        most = max((n for run in runs for d in run.deliveries for n in d.numbers), default=0)
        self._say(f"an undisturbed run over {most + 1} packs, to compare with")
        clean = undisturbed(
            job, self._folder / "undisturbed", packs=most + 1, timeout_s=UNDISTURBED_S
        )
        proof = prove(runs, packs_by_number(clean))
        recoveries = self._recoveries(runs)
        exits = Counter(
            (name.partition("-")[0], code) for name, code in self._targets.service.exits
        )
        violations = [*self._violations, *proof.violations]
        for (name, code), count in exits.items():
            if code not in ORDERLY_CODES:
                violations.append(f"{count} x {name} ended by itself with code {code}")
        for kind, times in recoveries.items():
            if max(times) > BOUND_S:
                violations.append(f"after {kind} a trainer stood still for {max(times):.1f} s")
        return Result(
            seconds=seconds,
            struck=self._struck,
            left_out=left_out,
            recoveries=recoveries,
            starts=len(runs),
            dp_sizes=Counter(run.dp_size for run in runs),
            exits=exits,
            memory=self._memory,
            counters=self._counters,
            proof=proof,
            violations=violations,
        )

    def _recoveries(self, runs: list[Run]) -> dict[str, list[float]]:
        """Seconds for which trainers stood still after a fault, at most; from the end of a run to
        the first micro-batch of all ranks of the next one."""
        found: dict[str, list[float]] = {}
        for struck in self._struck:
            if not struck.restarts:
                stood = longest_stand(runs[struck.run], struck.at, struck.at + EFFECT_S)
            else:
                starts = map(first_batches, itertools.islice(runs, struck.run + 1, None))
                first = next((at for at in starts if at is not None), None)
                if first is None:
                    continue
                stood = first - struck.at
            found.setdefault(struck.name, []).append(stood)
        return found


class _Watch:
    """For how long nothing has changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = time.monotonic()

    def stands_s(self, size: int, ranks: RankProcesses) -> float:
        if (size, ranks) != self._seen:
            self._seen, self._since = (size, ranks), time.monotonic()
        return time.monotonic() - self._since


def _lines(ranks: RankProcesses, rank: int) -> int:
    path = ranks.folder / f"rank-{rank}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
