"""Which packs are blamed for workers that end, whatever the workers had told of them."""

from __future__ import annotations

import itertools

from dataservice.core.suspicion import ALONE_ENDS, Suspicion, after_loss


def test_what_ends_every_worker_is_condemned_soon_whatever_was_known() -> None:
    longest = 0
    for told in itertools.product([False, True], repeat=3):
        pack, losses = Suspicion(), 0
        while not pack.condemned:
            in_reach = pack.alone or (losses < len(told) and told[losses])
            pack = after_loss(pack, in_reach=in_reach, under_build=pack.alone)
            losses += 1
        longest = max(longest, losses)
        assert losses >= 2 + ALONE_ENDS
    assert longest == 3 + ALONE_ENDS


def test_what_is_only_there_when_workers_end_is_never_condemned() -> None:
    pack = Suspicion()
    for _ in range(100):
        pack = after_loss(pack, in_reach=True, under_build=False)
    assert pack.isolated and pack.alone and not pack.condemned


def test_what_nobody_was_building_at_one_loss_is_built_as_before() -> None:
    assert after_loss(Suspicion(), in_reach=False, under_build=False) == Suspicion(losses=1)
