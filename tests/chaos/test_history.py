"""The chaos run's own proof: it finds what is missing, doubled or different, and forgives what a
start from a saved state undid."""

from __future__ import annotations

import dataclasses
import itertools

from chaos.faults import KINDS, draw_faults
from chaos.history import (
    MOST_UNFINISHED_STEPS,
    Run,
    first_batches,
    longest_stand,
    packs_by_number,
    prove,
)
from support.harness import Delivery

CLEAN = {n: (f"pack-{n}", f"digest-{n}") for n in range(200)}


def a_run(*, first_step: int, number: int, steps: int, dp_size: int = 2, at: float = 0.0) -> Run:
    """Of two micro-steps, whose packs begin at `number`; a micro-batch a second."""
    deliveries = []
    numbers = itertools.count(number)
    for step, micro_step, rank in itertools.product(range(steps), range(2), range(dp_size)):
        n = next(numbers)
        deliveries.append(
            Delivery(
                step=first_step + step,
                micro_step=micro_step,
                dp_rank=rank,
                pack_ids=(CLEAN[n][0],),
                numbers=(n,),
                digests=(CLEAN[n][1],),
                sample_keys=(),
                loss_tokens=0,
                holes=(),
                at=at + 2 * step + micro_step,
            )
        )
    return Run(first_step=first_step, dp_size=dp_size, micro_steps=2, deliveries=deliveries)


def without(run: Run, place: int) -> Run:
    return dataclasses.replace(
        run, deliveries=[*run.deliveries[:place], *run.deliveries[place + 1 :]]
    )


def test_runs_that_undo_steps_are_one_history() -> None:
    first = a_run(first_step=0, number=0, steps=5)
    second = a_run(first_step=3, number=12, steps=4, dp_size=3)  # on another grid
    nothing = Run(first_step=6, dp_size=2, micro_steps=2, deliveries=[])
    third = a_run(first_step=6, number=30, steps=2)
    proof = prove([first, second, nothing, third], CLEAN)
    assert proof.violations == ()
    assert (proof.steps, proof.packs, proof.undone) == (8, 38, 8 + 6)


def test_a_tail_that_some_ranks_have_not_got_is_no_violation() -> None:
    run = a_run(first_step=0, number=0, steps=4)
    proof = prove([without(run, len(run.deliveries) - 1)], CLEAN)
    assert proof.violations == ()
    assert (proof.steps, proof.undone) == (3, 3)


def test_a_missing_micro_batch() -> None:
    run = a_run(first_step=0, number=0, steps=MOST_UNFINISHED_STEPS + 3)
    proof = prove([without(run, 5)], CLEAN)
    assert any("step 1 is not whole" in text for text in proof.violations)
    assert any("rank 1 got (1, 1) after (0, 1)" in text for text in proof.violations)


def test_steps_that_were_skipped_at_a_start() -> None:
    first, second = a_run(first_step=0, number=0, steps=3), a_run(first_step=4, number=16, steps=30)
    (violation,) = prove([first, second], CLEAN).violations
    assert "step 3 is not whole" in violation


def test_a_start_that_goes_on_with_other_packs() -> None:
    first, second = a_run(first_step=0, number=0, steps=3), a_run(first_step=3, number=13, steps=1)
    (violation,) = prove([first, second], CLEAN).violations
    assert violation == "step 3 has packs [13, 14, 15, 16], should have [12, 13, 14, 15]"


def test_a_doubled_micro_batch() -> None:
    run = a_run(first_step=0, number=0, steps=2)
    again = dataclasses.replace(run, deliveries=[*run.deliveries, run.deliveries[-1]])
    assert any("was delivered twice" in text for text in prove([again], CLEAN).violations)


def test_other_bytes_even_in_steps_that_were_undone() -> None:
    run = a_run(first_step=0, number=0, steps=2)
    other = dataclasses.replace(run.deliveries[6], digests=("other",))
    broken = dataclasses.replace(run, deliveries=[*run.deliveries[:6], other, run.deliveries[7]])
    later = a_run(first_step=1, number=4, steps=3)
    (violation,) = prove([broken, later], CLEAN).violations
    assert violation == (
        "run 0: step 1: pack 6 is ('pack-6', 'other'), undisturbed it is ('pack-6', 'digest-6')"
    )


def test_times_to_recover() -> None:
    run = a_run(first_step=0, number=0, steps=2, at=100.0)
    late = dataclasses.replace(run.deliveries[-1], at=120.0)
    run = dataclasses.replace(run, deliveries=[*run.deliveries[:-1], late])
    assert longest_stand(run, since=105.0, until=106.0) == 15.0
    assert longest_stand(run, since=90.0, until=101.5) == 1.0
    assert longest_stand(run, since=121.0, until=130.0) == 0.0
    assert first_batches(run) == 100.0
    assert first_batches(dataclasses.replace(run, dp_size=3)) is None
    assert packs_by_number(run.deliveries) == {n: CLEAN[n] for n in range(8)}


def test_faults_follow_from_the_seed() -> None:
    first = list(itertools.islice(draw_faults(5), 400))
    assert first == list(itertools.islice(draw_faults(5), 400))
    assert first != list(itertools.islice(draw_faults(6), 400))
    assert {fault.kind for fault in first} == set(KINDS)
    others = itertools.islice(draw_faults(5, without=frozenset({"disk full"})), 400)
    assert "disk full" not in {fault.kind.name for fault in others}
