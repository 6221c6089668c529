import pytest

from dataservice.actors.holes import FREE_HOLES, HoleLedger
from dataservice.errors import HoleBudgetExceeded


def ledger(share: float = 0.1, row: int = 3) -> HoleLedger:
    return HoleLedger(max_share=share, max_in_a_row=row)


def test_the_first_report_wins() -> None:
    holes = ledger()
    assert holes.add("s/a.jsonl@10#0", "truncated", 4)
    assert not holes.add("s/a.jsonl@10#0", "something else", 5)
    assert holes.of_samples(["s/a.jsonl@10", "s/a.jsonl@20"]) == {"s/a.jsonl@10#0": "truncated"}
    assert holes.missing({"s/a.jsonl@10#0": "x", "s/a.jsonl@10#1": "y"}) == {"s/a.jsonl@10#1": "y"}


def test_the_share_counts_after_the_free_ones_and_names_the_worst_shard() -> None:
    holes = ledger(share=0.1, row=1000)
    holes.planned_samples = 100
    for i in range(10):
        holes.add(f"s/bad.jsonl@{i}#0", "truncated", 2 * i)
        holes.check_budget(2 * i)
    assert FREE_HOLES < 10
    holes.add("s/other.jsonl@1#0", "bad CRC", 50)
    with pytest.raises(HoleBudgetExceeded, match=r"s/bad\.jsonl with 10"):
        holes.check_budget(50)


def test_packs_in_a_row_are_counted_by_pack_number_whatever_the_order() -> None:
    holes = ledger(share=1.0, row=3)
    for number in (7, 9, 10):
        holes.add(f"s/a.jsonl@{number}#0", "truncated", number)
        holes.check_budget(number)
    holes.add("s/a.jsonl@8#0", "truncated", 8)
    with pytest.raises(HoleBudgetExceeded, match="7 to 10"):
        holes.check_budget(8)
