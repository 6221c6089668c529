from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.dispatch import choose_worker, next_to_build, worker_slot


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


def test_order_of_need_and_equal_shares_of_the_bound() -> None:
    waiting = [(5, 0, 0), (4, 1, 1), (4, 0, 0), (4, 0, 1)]
    sizes = [10, 10, 20, 20]

    def choose(held: dict[int, int]) -> int | None:
        return next_to_build(waiting, sizes, held, ready_bytes_bound=100, num_ranks=2)

    assert choose({}) == 2
    assert choose({0: 35}) == 3
    assert choose({0: 35, 1: 30}) == 3
    assert choose({0: 35, 1: 35}) is None
    assert next_to_build([(0, 0, 0)], [9], {}, ready_bytes_bound=0, num_ranks=4) == 0


def test_one_that_is_asked_for_is_built_in_its_turn_whatever_the_bound() -> None:
    waiting, sizes = [(5, 0, 0), (4, 0, 0), (4, 0, 1)], [60, 60, 60]

    def choose(held: dict[int, int], *asked: int) -> int | None:
        return next_to_build(
            waiting, sizes, held, ready_bytes_bound=100, num_ranks=2, asked=set(asked)
        )

    assert choose({0: 50, 1: 50}) is None
    assert choose({0: 50, 1: 50}, 0, 2) == 2
    assert choose({0: 50, 1: 50}, 0) == 0
    assert choose({0: 50}, 0) == 2


def test_out_of_turn_only_where_the_earlier_ones_fit_as_well() -> None:
    waiting, sizes = [(1, 0, 0), (2, 0, 0), (2, 0, 1)], [80, 10, 10]

    def choose(held: dict[int, int], *among: int, asked: tuple[int, ...] = ()) -> int | None:
        return next_to_build(
            waiting,
            sizes,
            held,
            ready_bytes_bound=200,
            num_ranks=2,
            asked=asked,
            among=set(among),
        )

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
    waiting = [(step, 0, rank) for step, (rank, _, _) in enumerate(packs)]
    sizes = [size for _, size, _ in packs]
    left, held, built = list(range(len(packs))), {}, set()
    for text_only in [*text_turns, *[False] * len(packs)]:
        i = next_to_build(
            [waiting[j] for j in left],
            [sizes[j] for j in left],
            held,
            ready_bytes_bound=400,
            num_ranks=4,
            among={n for n, j in enumerate(left) if packs[j][2]} if text_only else None,
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
