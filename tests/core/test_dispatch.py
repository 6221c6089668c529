from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.dispatch import Candidate, choose_worker, next_to_build, worker_slot


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_every_worker_gets_an_equal_share_of_cells(dp_size: int, num_workers: int) -> None:
    micro_steps = num_workers * 4
    load = Counter(
        worker_slot(rank, micro_step, dp_size=dp_size, num_workers=num_workers)
        for micro_step in range(micro_steps)
        for rank in range(dp_size)
    )
    assert load == Counter(dict.fromkeys(range(num_workers), micro_steps * dp_size // num_workers))


def test_a_rank_talks_to_one_worker_when_ranks_divide() -> None:
    for rank in range(8):
        slots = {worker_slot(rank, m, dp_size=8, num_workers=4) for m in range(16)}
        assert len(slots) == 1


def test_home_workers_come_first_and_failed_ones_are_avoided() -> None:
    def choose(home: list[str], avoid: frozenset[str] = frozenset()) -> str | None:
        return choose_worker(
            0, 0, dp_size=2, home_workers=home, all_workers=["a", "b", "c"], avoid=avoid
        )

    assert choose(["b"]) == "b"
    assert choose([]) == "a"
    assert choose(["b"], frozenset({"b"})) in {"a", "c"}
    assert choose(["b"], frozenset({"a", "b", "c"})) == "a"
    assert choose_worker(0, 0, dp_size=2, home_workers=[], all_workers=[]) is None


def of_rank(*packs: tuple[int, int], asked: tuple[int, ...] = (), usable: Any = ...) -> Any:
    """Candidates from (rank, bytes), the positions of those asked for and of those usable."""
    return [
        Candidate(rank, size, i in asked, usable is ... or i in usable)
        for i, (rank, size) in enumerate(packs)
    ]


def test_equal_shares_of_the_bound() -> None:
    waiting = of_rank((0, 20), (1, 20), (1, 10), (0, 10))

    def choose(held: dict[int, int]) -> int | None:
        return next_to_build(waiting, held, ready_bytes_bound=100, num_ranks=2)

    assert choose({}) == 0
    assert choose({0: 35}) == 1
    assert choose({0: 35, 1: 30}) == 1
    assert choose({0: 35, 1: 35}) is None
    assert next_to_build(of_rank((0, 9)), {}, ready_bytes_bound=0, num_ranks=4) == 0


def test_no_further_is_looked_than_the_pack_chosen() -> None:
    waiting = iter(of_rank((0, 60), (0, 60), (1, 60), (1, 60)))
    assert next_to_build(waiting, {0: 30}, ready_bytes_bound=100, num_ranks=2) == 2
    assert len(list(waiting)) == 1


def test_one_that_is_asked_for_is_built_in_its_turn_whatever_the_bound() -> None:
    def choose(held: dict[int, int], *asked: int) -> int | None:
        waiting = of_rank((0, 60), (1, 60), (0, 60), asked=asked)
        return next_to_build(waiting, held, ready_bytes_bound=100, num_ranks=2)

    assert choose({0: 50, 1: 50}) is None
    assert choose({0: 50, 1: 50}, 2, 1) == 1
    assert choose({0: 50, 1: 50}, 2) == 2
    assert choose({0: 50}, 2) == 1


def test_out_of_turn_only_where_the_earlier_ones_fit_as_well() -> None:
    def choose(held: dict[int, int], *usable: int, asked: tuple[int, ...] = ()) -> int | None:
        waiting = of_rank((0, 80), (0, 10), (1, 10), asked=asked, usable=usable)
        return next_to_build(waiting, held, ready_bytes_bound=200, num_ranks=2)

    assert choose({}, 1, 2) == 1
    assert choose({0: 15}, 1, 2) == 2
    assert choose({0: 15}, 1) is None
    assert choose({0: 15}, 1, asked=(1,)) == 1
    assert choose({}) is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans()), max_size=30),
    st.lists(st.booleans(), max_size=60),
)
def test_no_client_no_more_than_a_share_and_nothing_taken_from_earlier_packs(
    packs: list[tuple[int, int, bool]], text_turns: list[bool]
) -> None:
    """Built as far as it goes with nobody fetching, by builders of both kinds in any order."""
    sizes = [size for _, size, _ in packs]
    left, held, built = list(range(len(packs))), {}, set()
    for text_only in [*text_turns, *[False] * len(packs)]:
        i = next_to_build(
            [Candidate(*packs[j][:2], usable=packs[j][2] or not text_only) for j in left],
            held,
            ready_bytes_bound=400,
            num_ranks=4,
        )
        if i is not None:
            built.add(left[i])
            rank, size, _ = packs[left.pop(i)]
            held[rank] = held.get(rank, 0) + size
    for rank in range(4):
        mine = [j for j in range(len(packs)) if packs[j][0] == rank]
        expected, total = set(), 0
        for j in mine:
            total += sizes[j]
            if total > 100 and expected:
                break
            expected.add(j)
        assert {j for j in mine if j in built} == expected
