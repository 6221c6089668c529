from collections import Counter

import pytest

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
    assert choose({0: 35, 1: 35}) == 1
    assert choose({0: 45, 1: 45}) is None
    assert next_to_build([(0, 0, 0)], [9], {}, ready_bytes_bound=0, num_ranks=4) == 0
