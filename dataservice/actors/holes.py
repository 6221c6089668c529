"""The ledger of holes: each decided once, journalled before it is answered, held to a budget.

Invariants: the first report of a hole wins and never changes; a hole key is
"<sample key>#<image number>", or "<sample key>#record" for the record itself; past the budget the
ledger names the worst shard.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from dataservice.actors.pack_specs import sample_mark
from dataservice.errors import HoleBudgetExceeded

FREE_HOLES = 8
"""Holes that a run may have before its share counts."""
MOST_KINDS = 30
KIND_CHARS = 80
OTHER_KINDS = "other reasons"
_NUMBERS = re.compile(r"[0-9]+(?:[.,x][0-9]+)*")


def hole_key(sample_key: str, image: int | None) -> str:
    """Of a picture of the sample, or of its record."""
    return f"{sample_key}#{'record' if image is None else image}"


def parts_of(hole_key: str) -> tuple[str, int | None]:
    """(sample key, number of the picture in its sample or None for the record)."""
    sample, _, number = hole_key.rpartition("#")
    return sample, int(number) if number.isdecimal() else None


def kind_of(reason: str) -> str:
    """What the reason has in common with others: without its details, numbers and names."""
    return _NUMBERS.sub("N", reason.partition(": ")[0])[:KIND_CHARS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    key: str
    reason: str
    pack_number: int
    """Global number of the pack it was met in."""
    policy: str
    """`errors.bad_image` when it was met."""
    member: str = ""
    """Of the picture, in its archive; "" for a record."""
    archive: str = ""
    """Name, in the source, of the file that holds the picture; "" for a record."""

    @property
    def sample(self) -> str:
        """Sample key."""
        return parts_of(self.key)[0]

    @property
    def image(self) -> int | None:
        """Number of the picture in its sample; None for the record."""
        return parts_of(self.key)[1]

    @property
    def source(self) -> str:
        return self.key.partition("/")[0]

    @property
    def shard(self) -> str:
        """Name, in the source, of the record's file."""
        return self.sample.partition("/")[2].rpartition("@")[0]

    @property
    def place(self) -> str:
        """Of a picture, for people; "" for a record."""
        return f"{self.member} in {self.source}/{self.archive}" if self.archive else ""

    @property
    def told(self) -> str:
        """Reason and place."""
        return f"{self.reason} ({self.place})" if self.place else self.reason

    def __str__(self) -> str:
        return f"{self.key}: {self.told}"


class HoleLedger:
    def __init__(self, *, max_share: float, max_in_a_row: int) -> None:
        self._max_share = max_share
        self._max_in_a_row = max_in_a_row
        self._holes: dict[str, Hole] = {}
        self._by_sample: dict[str, list[Hole]] = {}
        self._marks: set[int] = set()
        """Of the samples that have holes."""
        self._by_shard: Counter[str] = Counter()
        self._by_kind: Counter[str] = Counter()
        self._packs: set[int] = set()
        self._new_samples: set[str] = set()
        self.planned_samples = 0
        """Since this start; so are the holes that the share counts."""

    def __len__(self) -> int:
        return len(self._holes)

    def restore(self, hole: Hole) -> None:
        """A hole of the journal."""
        self._holes[hole.key] = hole
        self._by_sample.setdefault(hole.sample, []).append(hole)
        self._marks.add(sample_mark(hole.sample))
        self._by_shard[f"{hole.source}/{hole.shard}"] += 1
        kind = kind_of(hole.reason)
        known = kind in self._by_kind or len(self._by_kind) < MOST_KINDS
        self._by_kind[kind if known else OTHER_KINDS] += 1
        self._packs.add(hole.pack_number)

    def add(self, hole: Hole) -> bool:
        """False when the hole is known already."""
        if hole.key in self._holes:
            return False
        self.restore(hole)
        self._new_samples.add(hole.sample)
        return True

    def may_be_of(self, marks: Iterable[int]) -> bool:
        """Whether samples with these marks (`pack_specs.sample_mark`) need a look."""
        return not self._marks.isdisjoint(marks)

    def of_samples(self, samples: Iterable[str]) -> dict[str, str]:
        """Key to reason."""
        if not self._by_sample:
            return {}
        found = (hole for sample in samples for hole in self._by_sample.get(sample, ()))
        return {hole.key: hole.reason for hole in found}

    def missing(self, holes: Mapping[str, str]) -> dict[str, str]:
        """Those of `holes` that nobody has reported yet."""
        return {key: reason for key, reason in holes.items() if key not in self._holes}

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

    def worst_shards(self, count: int) -> dict[str, int]:
        """ "<source>/<shard name>" to holes, the most first."""
        return dict(self._by_shard.most_common(count))

    def by_kind(self) -> dict[str, int]:
        """`kind_of` reasons to holes, the most first; at most MOST_KINDS of them and OTHER_KINDS
        for the rest."""
        return dict(self._by_kind.most_common())

    def holes(self) -> list[Hole]:
        """In the order in which they were decided."""
        return list(self._holes.values())

    def first_reasons(self, count: int) -> dict[str, str]:
        """Hole key to reason and place, of the first ones."""
        return {hole.key: hole.told for hole in islice(self._holes.values(), count)}

    def _worst(self) -> str:
        shard, count = next(iter(self.worst_shards(1).items()))
        example = next(h for h in self._holes.values() if f"{h.source}/{h.shard}" == shard)
        return f"worst shard {shard} with {count}, such as {example}"
