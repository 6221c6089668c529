"""The depth of prefetching, as a function of what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.depth import (
    LEAST_BYTES,
    MEMORY_SHARE,
    MOST,
    START,
    Depth,
    Seen,
    adapted,
    first_depth,
)

PLENTY = MEMORY_SHARE * MOST.size_bytes


def seen(**changes: Any) -> Seen:
    given = {
        "waited": False,
        "lacked_packs": False,
        "lacked_bytes": False,
        "held_bytes": 0,
        "free_bytes": PLENTY,
    }
    return Seen(**(given | changes))


def adaptive(depth: Depth, **changes: Any) -> Depth:
    return adapted(depth, seen(**changes), fixed_packs=False, fixed_bytes=False)


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("lacked_packs", [False, True])
@pytest.mark.parametrize("lacked_bytes", [False, True])
def test_what_held_back_grows_when_the_trainer_waited(
    waited: bool, lacked_packs: bool, lacked_bytes: bool
) -> None:
    after = adaptive(START, waited=waited, lacked_packs=lacked_packs, lacked_bytes=lacked_bytes)
    assert after.packs == START.packs * (2 if waited and lacked_packs else 1)
    assert after.size_bytes == START.size_bytes * (2 if waited and lacked_bytes else 1)


def test_growth_ends() -> None:
    depth = START
    for _ in range(20):
        depth = adaptive(depth, waited=True, lacked_packs=True, lacked_bytes=True)
    assert depth == MOST


def test_it_shrinks_with_the_free_memory_and_stays_small_until_the_trainer_waits() -> None:
    scarce = START.size_bytes // 4
    # what is held already would be free without
    free = {"held_bytes": scarce, "free_bytes": (MEMORY_SHARE - 1) * scarce}
    small = adaptive(START, **free)
    assert small == Depth(packs=START.packs, size_bytes=scarce)
    assert adaptive(small) == small
    assert adaptive(small, waited=True, lacked_bytes=True).size_bytes == 2 * scarce
    assert adaptive(small, waited=True, lacked_bytes=True, **free) == small
    assert adaptive(START, free_bytes=0).size_bytes == LEAST_BYTES


def test_numbers_that_were_given_stay() -> None:
    given = Depth(packs=3, size_bytes=1)
    assert first_depth(3, 1) == given
    scarce = seen(waited=True, lacked_packs=True, lacked_bytes=True, free_bytes=0)
    assert adapted(given, scarce, fixed_packs=True, fixed_bytes=True) == given
    assert adapted(START, scarce, fixed_packs=False, fixed_bytes=True) == Depth(
        packs=2 * START.packs, size_bytes=START.size_bytes
    )
    more = Depth(packs=2 * MOST.packs, size_bytes=1)
    assert adapted(more, scarce, fixed_packs=False, fixed_bytes=True) == more
