from __future__ import annotations

import dataclasses

import pytest

from dataservice.actors.holes import (
    FREE_HOLES,
    MOST_KINDS,
    OTHER_KINDS,
    Hole,
    HoleLedger,
    kind_of,
)
from dataservice.errors import HoleBudgetExceeded


def ledger(share: float = 0.1, row: int = 3) -> HoleLedger:
    return HoleLedger(max_share=share, max_in_a_row=row)


def hole(key: str, reason: str = "truncated", pack: int = 0) -> Hole:
    return Hole(
        key=key,
        reason=reason,
        pack_number=pack,
        policy="hole",
        member="x/a.jpg",
        archive="d/a.zip",
    )


def test_a_hole_says_where_it_is() -> None:
    picture = hole("s/d/a#1@b.jsonl@10#2")
    assert (picture.source, picture.shard) == ("s", "d/a#1@b.jsonl")
    assert (picture.sample, picture.image) == ("s/d/a#1@b.jsonl@10", 2)
    assert str(picture) == "s/d/a#1@b.jsonl@10#2: truncated (x/a.jpg in s/d/a.zip)"
    record = dataclasses.replace(hole("s/a.jsonl@10#record"), member="", archive="")
    assert (record.image, record.place) == (None, "")
    assert str(record) == "s/a.jsonl@10#record: truncated"


def test_the_first_report_wins() -> None:
    holes = ledger()
    assert holes.add(hole("s/a.jsonl@10#0", "truncated", 4))
    assert not holes.add(hole("s/a.jsonl@10#0", "something else", 5))
    assert holes.of_samples(["s/a.jsonl@10", "s/a.jsonl@20"]) == {"s/a.jsonl@10#0": "truncated"}
    assert holes.missing({"s/a.jsonl@10#0": "x", "s/a.jsonl@10#1": "y"}) == {"s/a.jsonl@10#1": "y"}
    assert [h.pack_number for h in holes.holes()] == [4]


def test_the_share_counts_after_the_free_ones_and_names_the_worst_shard() -> None:
    holes = ledger(share=0.1, row=1000)
    holes.planned_samples = 100
    for i in range(10):
        holes.add(hole(f"s/bad.jsonl@{i}#0", pack=2 * i))
        holes.check_budget(2 * i)
    assert FREE_HOLES < 10
    holes.add(hole("s/other.jsonl@1#0", "bad CRC", 50))
    with pytest.raises(HoleBudgetExceeded, match=r"s/bad\.jsonl with 10.*x/a\.jpg in s/d/a\.zip"):
        holes.check_budget(50)
    assert list(holes.worst_shards(5).items()) == [("s/bad.jsonl", 10), ("s/other.jsonl", 1)]
    assert list(holes.first_reasons(2)) == ["s/bad.jsonl@0#0", "s/bad.jsonl@1#0"]


def test_holes_of_the_journal_count_for_no_share() -> None:
    holes = ledger(share=0.0, row=1000)
    for i in range(FREE_HOLES + 5):
        holes.restore(hole(f"s/a.jsonl@{i}#0", pack=2 * i))
    holes.check_budget(0)
    for i in range(100, 100 + FREE_HOLES):
        holes.add(hole(f"s/a.jsonl@{i}#0", pack=2 * i))
        holes.check_budget(2 * i)


def test_packs_in_a_row_are_counted_by_pack_number_whatever_the_order() -> None:
    holes = ledger(share=1.0, row=3)
    for number in (7, 9, 10):
        holes.add(hole(f"s/a.jsonl@{number}#0", pack=number))
        holes.check_budget(number)
    holes.add(hole("s/a.jsonl@8#0", pack=8))
    with pytest.raises(HoleBudgetExceeded, match="7 to 10"):
        holes.check_budget(8)


def test_reasons_are_counted_by_what_they_have_in_common() -> None:
    holes = ledger()
    reasons = (
        "truncated JPEG: image file is truncated (13 bytes not processed)",
        "truncated JPEG: image file is truncated (7 bytes not processed)",
        "JPEG is 20x30 pixels upright, the index says 20x31",
        "JPEG is 5x7 pixels upright, the index says 6x7",
        "decode took longer than 2.5 s",
    )
    for i, reason in enumerate(reasons):
        holes.add(hole(f"s/a.jsonl@{i}#0", reason))
    assert holes.by_kind() == {
        "truncated JPEG": 2,
        "JPEG is N pixels upright, the index says N": 2,
        "decode took longer than N s": 1,
    }
    assert len(kind_of("x" * 1000)) < 100


def test_kinds_of_reasons_are_few_whatever_is_reported() -> None:
    holes = ledger()
    for i in range(100):
        letters = f"{chr(97 + i // 26)}{chr(97 + i % 26)}"
        holes.add(hole(f"s/a.jsonl@{i}#0", f"what the library says of {letters}"))
    kinds = holes.by_kind()
    assert len(kinds) == MOST_KINDS + 1
    assert kinds[OTHER_KINDS] == 100 - MOST_KINDS
    assert sum(kinds.values()) == 100
