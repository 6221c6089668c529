from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.packspec import ShardRef
from dataservice.storage.objects import staged_name
from dataservice.storage.staging import Need, Use, decide


def need(name: str, size: int, next_use: int, *, copy: bool = True, share: float = 1.0) -> Need:
    shard = ShardRef(source="s", name=name, url=f"/{name}", size_bytes=size, mtime_ns=1)
    return Need(shard=shard, crc32=-1, next_use=next_use, copy=copy, share=share)


def cached_of(*needs: Need) -> dict[str, int]:
    return {staged_name(n.shard): n.shard.size_bytes for n in needs}


def names(needs: tuple[Need, ...]) -> list[str]:
    return [n.shard.name for n in needs]


def test_copies_come_in_the_order_of_need_until_one_does_not_fit() -> None:
    needs = [need("c", 4, 3), need("a", 4, 1), need("b", 4, 2), need("small", 1, 4)]
    decision = decide(needs, {}, 9)
    assert names(decision.copy) == ["a", "b"]
    assert (decision.evict, decision.too_large) == ((), ())
    assert names(decision.no_room) == ["c", "small"]


def test_what_is_needed_as_soon_as_one_that_does_not_fit_is_copied() -> None:
    needs = [need("a", 4, 1), need("b", 9, 2), need("small", 1, 2, share=0.5), need("c", 1, 3)]
    decision = decide(needs, {}, 9)
    assert (names(decision.copy), names(decision.no_room)) == (["a", "small"], ["b", "c"])


def test_unneeded_copies_go_first_then_those_needed_last() -> None:
    soon, late, latest, old = need("a", 4, 1), need("b", 4, 5), need("c", 4, 9), need("old", 4, 0)
    decision = decide([soon, late, latest], cached_of(late, latest, old), 8)
    assert names(decision.copy) == ["a"]
    assert list(decision.evict) == [staged_name(old.shard), staged_name(latest.shard)]


def test_unneeded_copies_stay_while_there_is_room() -> None:
    old = need("old", 4, 0)
    decision = decide([need("a", 4, 1)], cached_of(old), 8)
    assert names(decision.copy) == ["a"] and decision.evict == ()


def test_nothing_needed_sooner_is_dropped_for_something_later() -> None:
    soon, late = need("a", 6, 1), need("b", 6, 2)
    decision = decide([soon, late], cached_of(soon), 8)
    assert (decision.copy, decision.evict) == ((), ())


def test_what_is_in_use_is_not_dropped_for_what_is_needed_as_soon() -> None:
    here, there = need("a", 6, 0), need("b", 6, 0)
    decision = decide([there, here], cached_of(here), 8)
    assert (decision.copy, decision.evict, names(decision.no_room)) == ((), (), ["b"])


def test_of_those_needed_as_soon_the_one_comes_first_of_which_most_is_read() -> None:
    needs = [need("a", 4, 1, share=0.3), need("b", 4, 1, share=0.9), need("c", 4, 0, share=0.1)]
    assert names(decide(needs, {}, 12).copy) == ["c", "b", "a"]


def test_a_shard_above_the_budget_is_never_staged_and_blocks_nobody() -> None:
    large, small = need("large", 20, 1), need("small", 3, 2)
    decision = decide([large, small], {}, 10)
    assert (names(decision.copy), names(decision.too_large)) == (["small"], ["large"])


def test_a_late_need_keeps_its_copy_but_is_not_copied() -> None:
    late, later, old = need("b", 4, 5, copy=False), need("c", 4, 9, copy=False), need("old", 4, 0)
    decision = decide([need("a", 4, 1), late, later], cached_of(later, old), 8)
    assert (names(decision.copy), list(decision.evict)) == (["a"], [staged_name(old.shard)])
    decision = decide([need("a", 4, 1), late, later], cached_of(late, later), 8)
    assert (names(decision.copy), list(decision.evict)) == (["a"], [staged_name(later.shard)])


def test_a_shard_of_which_little_is_read_takes_no_room_from_what_is_needed() -> None:
    little, much = need("little", 4, 1, share=0.1), need("much", 4, 2, share=0.3)
    late, old = need("late", 4, 9, copy=False), need("old", 4, 0)
    decision = decide([little, late], cached_of(late), 7)
    assert (decision.copy, decision.evict, decision.no_room) == ((), (), (little,))
    assert decide([little, late], cached_of(late), 8).copy == (little,)
    assert decide([little, late], cached_of(late, old), 8).evict == (staged_name(old.shard),)
    decision = decide([little, much, late], cached_of(late), 7)
    assert (decision.copy, decision.no_room) == ((much,), (little,))
    assert decision.evict == (staged_name(late.shard),)


def test_what_another_job_needs_sooner_holds_its_room() -> None:
    mine, cached = need("mine", 4, 3), need("theirs", 4, 1)
    coming = {
        staged_name(need("soon", 4, 2).shard): Use(next_use=2, size_bytes=4, copy=True, share=1.0)
    }
    theirs = {staged_name(cached.shard): Use(next_use=1, size_bytes=4, copy=True, share=1.0)}
    assert decide([mine], cached_of(cached), 7, others=theirs).no_room == (mine,)
    assert decide([mine], cached_of(cached), 7).copy == (mine,)
    assert decide([mine], cached_of(cached), 11, others=theirs | coming).copy == ()
    assert decide([mine], cached_of(cached), 12, others=theirs | coming).copy == (mine,)


def test_a_copy_that_arrives_is_neither_made_twice_nor_dropped() -> None:
    arriving, sooner = need("a", 6, 9), need("b", 6, 1)
    name = staged_name(arriving.shard)
    decision = decide([arriving, sooner], {name: 6}, 8, arriving=[name])
    assert (decision.copy, decision.evict, decision.no_room) == ((), (), (sooner,))


def test_a_packed_shard_takes_the_room_of_its_content() -> None:
    shard = ShardRef(
        source="s", name="a", url="/a", size_bytes=3, mtime_ns=1, packing="gz", unpacked_bytes=9
    )
    packed = Need(shard=shard, crc32=-1, next_use=1)
    assert decide([packed], {}, 8).too_large == (packed,)
    assert decide([packed], {}, 9).copy == (packed,)


_NEEDS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 9), st.booleans(), st.booleans()), max_size=9
)


@settings(deadline=None, max_examples=300)
@given(_NEEDS, st.sets(st.integers(0, 12)), st.integers(0, 30), st.data())
def test_decisions_hold_their_promises(
    drawn: list[tuple[int, int, bool, bool]], held: set[int], budget: int, data: st.DataObject
) -> None:
    size = {number: 1 + number * 5 % 7 for number in range(13)}
    own = [
        need(str(n), size[n], use, copy=c, share=1 / (1 + n % 7))
        for n, use, c, mine in drawn
        if mine
    ]
    theirs = {
        staged_name(need(str(n), 0, 0).shard): Use(
            next_use=use, size_bytes=size[n], copy=c, share=1 / (1 + n % 7)
        )
        for n, use, c, mine in drawn
        if not mine
    }
    cached = cached_of(*(need(str(number), size[number], 0) for number in held))
    arriving = data.draw(st.sets(st.sampled_from(sorted(cached)))) if cached else set()
    decision = decide(own, cached, budget, others=theirs, arriving=arriving)

    first_use = {name: use.next_use for name, use in theirs.items()}
    for one in own:
        name = staged_name(one.shard)
        first_use[name] = min(first_use.get(name, one.next_use), one.next_use)
    copies = {staged_name(n.shard): n.shard.size_bytes for n in decision.copy}
    assert not copies.keys() & cached.keys() and set(decision.evict) <= cached.keys()
    assert not set(decision.evict) & arriving and len(set(decision.evict)) == len(decision.evict)
    after = {n: s for n, s in {**cached, **copies}.items() if n not in decision.evict}
    assert sum(after.values()) <= max(budget, sum(cached[name] for name in arriving))
    coming = copies.keys() | {name for name, use in theirs.items() if use.copy} - cached.keys()
    soonest = min((first_use[name] for name in coming), default=100)
    for name in decision.evict:
        if sum(cached.values()) <= budget:
            assert name not in first_use or first_use[name] > soonest
    uses = [first_use[staged_name(n.shard)] for n in decision.copy]
    assert uses == sorted(uses)
    wanted = {staged_name(n.shard) for n in own if n.copy}
    without = (*decision.copy, *decision.too_large, *decision.no_room)
    assert {staged_name(n.shard) for n in without} == wanted - cached.keys()
