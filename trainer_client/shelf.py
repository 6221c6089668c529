"""Packs in shared memory that one process keeps for others of its host until each has read them.

Invariants: all segments together stay within the bound, where one pack does not take more; a
segment is written again only when nobody reads it; a pack that finds no room, or gives room to
newer ones, is told apart from one that has yet to come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from dataservice.rpc.local import Segment, roomy
from dataservice.wire.encoded import EncodedPack

REMEMBERED = 4096
"""Packs that were here and are gone, of which it is known."""


@dataclass(slots=True, eq=False)
class Shelved:
    """A pack in its segment."""

    pack_id: str
    segment: Segment
    size_bytes: int
    """Of the pack; the segment may be larger."""
    taken_by: set[int] = field(default_factory=set)
    readers: int = 0
    on_shelf: bool = True


class Shelf:
    """Safe across threads."""

    def __init__(self, *, readers: int, max_bytes: int) -> None:
        """A pack stays until `readers` have taken it."""
        self._readers, self._max_bytes = readers, max_bytes
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, Shelved] = OrderedDict()
        self._lent: set[Shelved] = set()
        """Read by somebody."""
        self._free: list[Segment] = []
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self.size_bytes = 0
        """Of all segments."""

    def put(self, pack_id: str, pack: EncodedPack) -> None:
        """Copies the pack."""
        size_bytes = pack.segment_bytes
        with self._lock:
            if pack_id in self._packs or self._closed:
                return
            segment = self._segment(size_bytes)
            if segment is None:
                self._forget(pack_id)
                return
        try:
            segment.write(pack)
        except BaseException:
            with self._lock:
                self._give_up(segment)
            raise
        with self._lock:
            if self._closed or pack_id in self._packs:
                self._give_up(segment)
                return
            self._gone.pop(pack_id, None)
            self._packs[pack_id] = Shelved(pack_id, segment, size_bytes)

    def take(self, pack_id: str, reader: int) -> Shelved | None:
        """For a reader, who is to `let_go` of it; None when it is not here."""
        with self._lock:
            pack = self._packs.get(pack_id)
            if pack is None:
                return None
            pack.readers += 1
            self._lent.add(pack)
            pack.taken_by.add(reader)
            if len(pack.taken_by) >= self._readers:
                self._drop(pack)
            return pack

    def let_go(self, pack: Shelved) -> None:
        with self._lock:
            pack.readers -= 1
            if pack.readers == 0:
                self._lent.discard(pack)
                if not pack.on_shelf:
                    self._recycle(pack.segment)

    def is_gone(self, pack_id: str) -> bool:
        """Whether it was here, or found no room."""
        with self._lock:
            return pack_id in self._gone and pack_id not in self._packs

    @property
    def num_packs(self) -> int:
        return len(self._packs)

    def close(self) -> None:
        """Nobody reads any more. Idempotent."""
        with self._lock:
            self._closed = True
            packs = {*self._packs.values(), *self._lent}
            for segment in [*(pack.segment for pack in packs), *self._free]:
                self._give_up(segment)
            self._packs.clear()
            self._lent.clear()
            self._free.clear()

    # ---- with the lock --------------------------------------------------------------------------

    def _segment(self, size_bytes: int) -> Segment | None:
        """One that nobody uses; None where there is no room for it."""
        while True:
            fitting = [s for s in self._free if s.size_bytes >= size_bytes]
            if fitting:
                segment = min(fitting, key=lambda one: one.size_bytes)
                self._free.remove(segment)
                return segment
            if self.size_bytes == 0 or self.size_bytes + roomy(size_bytes) <= self._max_bytes:
                return self._new(roomy(size_bytes))
            if self._free:
                self._give_up(self._free.pop())
                continue
            unread = next((pack for pack in self._packs.values() if not pack.readers), None)
            if unread is None:
                return None
            self._drop(unread)

    def _new(self, size_bytes: int) -> Segment | None:
        try:
            segment = Segment(size_bytes)
        except OSError:
            return None
        self.size_bytes += size_bytes
        return segment

    def _drop(self, pack: Shelved) -> None:
        del self._packs[pack.pack_id]
        pack.on_shelf = False
        self._forget(pack.pack_id)
        if not pack.readers:
            self._recycle(pack.segment)

    def _forget(self, pack_id: str) -> None:
        self._gone[pack_id] = None
        self._gone.move_to_end(pack_id)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _recycle(self, segment: Segment) -> None:
        if self._closed:
            return
        self._free.append(segment)

    def _give_up(self, segment: Segment) -> None:
        self.size_bytes -= segment.size_bytes
        segment.close()
