"""The ledger of holes: each decided once, journalled before it is answered, held to a budget.

Invariants: the first report of a hole wins and never changes; a hole key is
"<sample key>#<image number>"; past the budget the ledger names the worst shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dataservice.errors import HoleBudgetExceeded

FREE_HOLES = 8
"""Holes that a run may have before its share counts."""


def sample_of(hole_key: str) -> str:
    return hole_key.rpartition("#")[0]


def shard_of(hole_key: str) -> str:
    """ "<source>/<shard name>" of the hole's record."""
    return hole_key.rpartition("@")[0]


class HoleLedger:
    def __init__(self, *, max_share: float, max_in_a_row: int) -> None:
        self._max_share = max_share
        self._max_in_a_row = max_in_a_row
        self._reasons: dict[str, str] = {}
        self._by_sample: dict[str, set[str]] = {}
        self._packs: set[int] = set()
        self._new_samples: set[str] = set()
        self.planned_samples = 0
        """Since this start; so are the holes that the share counts."""

    def __len__(self) -> int:
        return len(self._reasons)

    def restore(self, key: str, reason: str, pack_number: int) -> None:
        """A hole of the journal."""
        self._reasons[key] = reason
        self._by_sample.setdefault(sample_of(key), set()).add(key)
        if pack_number >= 0:
            self._packs.add(pack_number)

    def add(self, key: str, reason: str, pack_number: int) -> bool:
        """False when the hole is known already."""
        if key in self._reasons:
            return False
        self.restore(key, reason, pack_number)
        self._new_samples.add(sample_of(key))
        return True

    def of_samples(self, samples: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self._by_sample:
            return found
        for sample in samples:
            for key in self._by_sample.get(sample, ()):
                found[key] = self._reasons[key]
        return found

    def missing(self, holes: Mapping[str, str]) -> dict[str, str]:
        """Those of `holes` that nobody has reported yet."""
        return {key: reason for key, reason in holes.items() if key not in self._reasons}

    def check_budget(self, pack_number: int) -> None:
        """Raises HoleBudgetExceeded when the share or the run of packs in a row is over."""
        samples = len(self._new_samples)
        allowed = max(FREE_HOLES, int(self._max_share * self.planned_samples))
        if samples > allowed:
            raise HoleBudgetExceeded(
                f"{samples} new samples with holes of {self.planned_samples} planned are more than "
                f"errors.max_hole_share = {self._max_share:g} allows; {self._worst()}"
            )
        first = last = pack_number
        while first - 1 in self._packs:
            first -= 1
        while last + 1 in self._packs:
            last += 1
        if pack_number in self._packs and last - first + 1 > self._max_in_a_row:
            raise HoleBudgetExceeded(
                f"{last - first + 1} packs in a row ({first} to {last}) have holes, more than "
                f"errors.max_holes_in_a_row = {self._max_in_a_row}; {self._worst()}"
            )

    def by_shard(self) -> Counter[str]:
        return Counter(shard_of(key) for key in self._reasons)

    def reasons(self) -> dict[str, str]:
        return dict(self._reasons)

    def _worst(self) -> str:
        shard, count = self.by_shard().most_common(1)[0]
        example = next(key for key in self._reasons if shard_of(key) == shard)
        return f"worst shard {shard} with {count}, such as {example}: {self._reasons[example]}"
