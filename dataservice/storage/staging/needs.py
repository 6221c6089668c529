"""What to copy to a node's own disk and what to drop for it, by next use in the plan; pure.

Invariants: nothing needed sooner is dropped for something needed later, and nothing needed at the
same time for something that is not there yet; nothing that is needed is dropped for a shard of
which little is read, as that would copy many times what is read; what stays and what comes fit the
budget together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dataservice.core.packspec import ShardRef
from dataservice.storage.objects import staged_name

LEAST_SHARE = 0.25
"""Of a shard, for it to take the room of one that is needed again: at most four times what is read
is copied then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A shard that the plan will read."""

    shard: ShardRef
    crc32: int
    """Of the whole file; -1 where unknown."""
    next_use: int
    """Order of need: small numbers first. 0 or less: in use now."""
    copy: bool = True
    """False: it is needed too late to be copied for now, but a copy that is there is worth that
    much."""
    share: float = 1.0
    """What part of it is read soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What another job on the node needs."""

    next_use: int
    size_bytes: int
    copy: bool
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    copy: tuple[Need, ...]
    """In the order in which to copy."""
    evict: tuple[str, ...]
    """Names to drop as room is needed: unneeded first, then needed last first."""
    too_large: tuple[Need, ...]
    """Larger than the whole budget: never staged, always read from the origin."""
    no_room: tuple[Need, ...]
    """To be copied when others are no longer needed; read from the origin until then."""


@dataclass(slots=True)
class _Wanted:
    next_use: int
    size_bytes: int
    own: Need | None
    copy: bool
    share: float

    @property
    def gives_way(self) -> bool:
        return self.share < LEAST_SHARE


def decide(
    needs: Sequence[Need],
    cached: Mapping[str, int],
    budget_bytes: int,
    *,
    others: Mapping[str, Use] | None = None,
    arriving: Collection[str] = (),
) -> Decision:
    """What to copy of `needs`, and what may be dropped for it.

    `cached` maps names of copies to their sizes, of complete ones and of those that are being made
    (`arriving`, which are not dropped). `others` are the needs of the node's other jobs: they hold
    their room, but are not copied here. Shards are taken in the order of need until one does not
    fit; nothing that is needed after it is copied, but copies that still fit stay. One with less
    than LEAST_SHARE comes only where it costs no copy that is needed.
    """
    wanted = _in_order(needs, others or {}, cached)
    room = budget_bytes - sum(cached[name] for name in arriving)
    later = sum(cached[name] for name in wanted if name in cached and name not in arriving)
    copy: list[Need] = []
    too_large: list[Need] = []
    no_room: list[Need] = []
    kept = set(arriving)
    full_at = math.inf
    for name, want in wanted.items():
        if name in kept:
            continue
        if name in cached:
            later -= want.size_bytes
            if want.size_bytes <= room:
                room -= want.size_bytes
                kept.add(name)
        elif not want.copy:
            continue
        elif want.size_bytes > budget_bytes:
            if want.own is not None:
                too_large.append(want.own)
        elif want.next_use > full_at or want.size_bytes > room - later * want.gives_way:
            if want.size_bytes > room:
                full_at = min(full_at, want.next_use)
            if want.own is not None:
                no_room.append(want.own)
        else:
            room -= want.size_bytes
            if want.own is not None:
                copy.append(want.own)
    return Decision(
        copy=tuple(copy),
        evict=_evictable(wanted, cached, kept, room),
        too_large=tuple(too_large),
        no_room=tuple(no_room),
    )


def _evictable(
    wanted: Mapping[str, _Wanted], cached: Mapping[str, int], kept: set[str], room: int
) -> tuple[str, ...]:
    """What need not stay: the unneeded that have no room either, then what is needed last."""
    unneeded = []
    for name in sorted(cached.keys() - wanted.keys() - kept):
        if cached[name] <= room:
            room -= cached[name]
        else:
            unneeded.append(name)
    last_first = [name for name in reversed(list(wanted)) if name in cached and name not in kept]
    return (*unneeded, *last_first)


def _in_order(
    needs: Sequence[Need], others: Mapping[str, Use], cached: Mapping[str, int]
) -> dict[str, _Wanted]:
    """By name, in the order of need; of those needed at the same time the cached ones first, then
    those of which most is read."""
    found: dict[str, _Wanted] = {}
    for need in needs:
        name = staged_name(need.shard)
        known = found.get(name)
        if known is None:
            size = cached.get(name, need.shard.content_bytes)
            found[name] = _Wanted(need.next_use, size, need, need.copy, need.share)
        else:
            known.copy |= need.copy
            known.share = max(known.share, need.share)
            if need.next_use < known.next_use:
                known.next_use, known.own = need.next_use, need
    for name, use in others.items():
        known = found.get(name)
        if known is None:
            size = cached.get(name, use.size_bytes)
            found[name] = _Wanted(use.next_use, size, None, use.copy, use.share)
        else:
            known.next_use = min(known.next_use, use.next_use)
            known.share = max(known.share, use.share)

    def rank(item: tuple[str, _Wanted]) -> tuple[int, bool, float]:
        name, want = item
        return want.next_use, name not in cached, -want.share

    return dict(sorted(found.items(), key=rank))
