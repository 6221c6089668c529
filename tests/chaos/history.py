"""A training run that was started anew many times, joined to the one history that counts, and the
proof that it is as if nothing had happened.

Invariants: a start from a saved state undoes every step at or after it; pack n of the plan is the
same pack with the same bytes in every run, whatever its grid.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.harness import Delivery

MOST_UNFINISHED_STEPS = 16
"""Some ranks may have got so many steps at the end that others have not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """From one start of the trainers to the next."""

    first_step: int
    """Of the state it resumed from."""
    dp_size: int
    micro_steps: int
    deliveries: Sequence[Delivery]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    steps: int
    packs: int
    undone: int
    """Packs delivered in steps that a later start undid, or that not all ranks came to."""
    violations: tuple[str, ...]


def final_line(runs: Sequence[Run]) -> dict[int, tuple[Run, list[Delivery]]]:
    """By step, with the run that it counts of."""
    line: dict[int, tuple[Run, list[Delivery]]] = {}
    for run in runs:
        line = {step: found for step, found in line.items() if step < run.first_step}
        for delivery in run.deliveries:
            line.setdefault(delivery.step, (run, []))[1].append(delivery)
    return dict(sorted(line.items()))


def prove(runs: Sequence[Run], clean: Mapping[int, tuple[str, str]]) -> Proof:
    """`clean`: (pack id, digest) by pack number, of an undisturbed run."""
    violations: list[str] = []
    line = final_line(runs)
    steps = number = 0
    for step, (run, deliveries) in line.items():
        if step != steps or not _is_whole(run, deliveries):
            break
        steps += 1
        got = sorted(n for d in deliveries for n in d.numbers)
        expected = list(range(number, number + len(got)))
        if got != expected:
            violations.append(f"step {step} has packs {got}, should have {expected}")
        number += len(got)
    unfinished = max(line, default=-1) + 1 - steps
    if unfinished > MOST_UNFINISHED_STEPS:
        violations.append(
            f"step {steps} is not whole, though there are deliveries up to step {max(line)}"
        )
    total = 0
    for i, run in enumerate(runs):
        violations += [f"run {i}: {text}" for text in _wrong(run, clean)]
        total += sum(len(d.numbers) for d in run.deliveries)
    return Proof(steps=steps, packs=number, undone=total - number, violations=tuple(violations))


def _is_whole(run: Run, deliveries: Sequence[Delivery]) -> bool:
    places = {(d.micro_step, d.dp_rank) for d in deliveries}
    return len(places) == run.micro_steps * run.dp_size


def _wrong(run: Run, clean: Mapping[int, tuple[str, str]]) -> list[str]:
    """What this run's trainers had in hand that no undisturbed run gives."""
    found = []
    seen: dict[tuple[int, int, int], int] = defaultdict(int)
    last: dict[int, tuple[int, int]] = {}
    for d in run.deliveries:
        place = (d.step, d.micro_step, d.dp_rank)
        seen[place] += 1
        if seen[place] == 2:
            found.append(f"(step, micro-step, rank) {place} was delivered twice")
        before = last.get(d.dp_rank, (run.first_step, -1))
        after = (before[0], before[1] + 1)
        if after[1] == run.micro_steps:
            after = (before[0] + 1, 0)
        if (d.step, d.micro_step) != after:
            found.append(f"rank {d.dp_rank} got {place[:2]} after {before}")
        last[d.dp_rank] = (d.step, d.micro_step)
        for n, pack in zip(d.numbers, zip(d.pack_ids, d.digests, strict=True), strict=True):
            if n in clean and clean[n] != pack:
                found.append(f"step {d.step}: pack {n} is {pack}, undisturbed it is {clean[n]}")
    return found


def packs_by_number(deliveries: Sequence[Delivery]) -> dict[int, tuple[str, str]]:
    return {
        n: (pack_id, digest)
        for d in deliveries
        for n, pack_id, digest in zip(d.numbers, d.pack_ids, d.digests, strict=True)
    }


def longest_stand(run: Run, since: float, until: float) -> float:
    """Longest time, in seconds, for which a trainer of this run stood still after `since`: a pause
    between micro-batches that is under way then or begins before `until`."""
    longest = 0.0
    times: dict[int, list[float]] = defaultdict(list)
    for d in run.deliveries:
        times[d.dp_rank].append(d.at)
    for its in times.values():
        for before, after in itertools.pairwise(its):
            if after > since and before < until:
                longest = max(longest, after - max(before, since))
    return longest


def first_batches(run: Run) -> float | None:
    """When the last rank had its first micro-batch; None if not all had one."""
    first: dict[int, float] = {}
    for d in run.deliveries:
        first.setdefault(d.dp_rank, d.at)
    return max(first.values()) if len(first) == run.dp_size else None
