"""Pass 1 of balancing: which packs share a cell and which cells a block, before any has a rank.

Invariants: a block is what the ranks of one sync domain do in one micro-step; blocks come by
falling peak (their costliest cell), cells of a block by falling cost. One pack a cell: blocks are
cut from the packs by falling cost, which makes the peaks the least possible, the largest, second
largest and so on all at once.

Several packs a cell: several ways to fill cells, of which the caller takes the best. Blocks are cut
from the packs by falling cost, and the cells of each evened out; or the cells of the whole step
are; or a block's cells are filled up to its costliest pack, or to the mean of what is left; or
images are dealt to cells that are short of them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance.evening import even_out
from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The packs of a step, checked, and its grid."""

    cost: Ints
    """[M], their sum below 2**62."""
    home: Ints
    """[M], node numbers, -1 = nowhere."""
    images: Ints
    """[M]: images, at most `min_images` each."""
    min_images: int
    ranks: int
    steps: int
    per_node: int
    domain: int
    per_cell: int

    @property
    def num_domains(self) -> int:
        return self.ranks // self.domain

    @property
    def num_cells(self) -> int:
        return self.ranks * self.steps

    @property
    def budget(self) -> int:
        """Comparisons of one search."""
        return min(max(1 << 21, 128 * len(self.cost)), 1 << 23)

    def short_cells(self, members: Ints) -> int:
        """Cells [..., packs per cell] with fewer than `min_images`."""
        return int((self.images[members].sum(axis=-1) < self.min_images).sum())

    def kinds(self) -> Ints:
        """[M]: swaps of packs of one kind leave the number of cells without images as it is."""
        return np.zeros_like(self.images) if self.per_cell == 1 else self.images


def blocks(step: Step) -> Iterator[Ints]:
    """Groupings to choose from, [blocks, domain, packs per cell] pack numbers each."""
    order = _by_cost(step)
    if step.per_cell == 1:
        yield order.reshape(-1, step.domain, 1)
        return
    cost, images = step.cost[order], step.images[order]
    for places in _ways(step, cost, images):
        yield _named(_sorted_cells(cost, places), order, cost, images)


def _by_cost(step: Step) -> Ints:
    """Packs by falling cost; equal ones by turns of `per_node * per_cell` packs of each home, so
    that blocks of equal packs hold as many of each home as its node has room for."""
    packs = np.arange(len(step.cost))
    falling = -step.cost
    grouped = np.lexsort((step.home, -step.images, falling))
    same = np.zeros(len(packs), dtype=bool)
    same[1:] = True
    for key in (falling, step.images, step.home):
        same[1:] &= np.diff(key[grouped]) == 0
    starts = np.maximum.accumulate(np.where(same, 0, packs))
    turn = np.empty(len(packs), dtype=np.int64)
    turn[grouped] = (packs - starts) // (step.per_node * step.per_cell)
    return np.lexsort((step.home, turn, -step.images, falling)).astype(np.int64)


# ---- several packs a cell; `places` are places in the order by falling cost ----------------------


def _ways(step: Step, cost: Ints, images: Ints) -> Iterator[Ints]:
    """[blocks, domain, packs per cell] places."""
    shape = (-1, step.domain, step.per_cell)
    same_kind = np.zeros_like(cost)
    rows = np.arange(len(cost)).reshape(-1, step.per_cell, step.domain)
    yield _evened(_layered(rows, cost), cost, same_kind, step.budget)
    cells = _layered(np.arange(len(cost)).reshape(1, step.per_cell, -1), cost)
    yield _evened(cells, cost, same_kind, step.budget).reshape(shape)
    yield fill_cells(cost, step.domain, step.per_cell).reshape(shape)
    if step.min_images:
        dealt = _deal_images(step, cost, images)
        yield _evened(dealt[None], cost, images, step.budget).reshape(shape)


def _cells(cost: Ints, places: Ints) -> Ints:
    cells: Ints = cost[places].sum(axis=-1)
    return cells


def _layered(layers: Ints, cost: Ints) -> Ints:
    """[groups, cells, layers] from [groups, layers, cells]: of every layer one to each cell of the
    group, the costliest to the cheapest cell."""
    groups, num, cells = layers.shape
    dealt = np.empty((groups, cells, num), dtype=np.int64)
    total = np.zeros((groups, cells), dtype=np.int64)
    for i in range(num):
        np.put_along_axis(dealt[:, :, i], np.argsort(total, axis=1, kind="stable"), layers[:, i], 1)
        total += cost[dealt[:, :, i]]
    return dealt


@compiled
def _evened(groups: Ints, cost: Ints, kind: Ints, budget: int) -> Ints:
    """[groups, cells, packs per cell]: the largest cell of each group lowered by swaps inside."""
    count, cells, per_cell = groups.shape
    evened = np.empty_like(groups)
    bins = np.empty((per_cell, cells), dtype=np.int64)
    load = np.empty(cells, dtype=np.int64)
    for group in range(count):
        for cell in range(cells):
            load[cell] = 0
            for i in range(per_cell):
                bins[i, cell] = groups[group, cell, i]
                load[cell] += cost[bins[i, cell]]
        target = -(-int(load.sum()) // cells)
        even_out(bins, cost, kind, load, target, False, budget // count)
        for cell in range(cells):
            for i in range(per_cell):
                evened[group, cell, i] = bins[i, cell]
    return evened


def _deal_images(step: Step, cost: Ints, images: Ints) -> Ints:
    """[cells, packs per cell]: images first to cells that are short of them, then as `_layered`."""
    num = step.num_cells
    dealt = np.empty((num, step.per_cell), dtype=np.int64)
    total = np.zeros(num, dtype=np.int64)
    held = np.zeros(num, dtype=np.int64)
    left = np.argsort(-images, kind="stable")
    for i in range(step.per_cell):
        missing = np.maximum(step.min_images - held, 0)
        if not missing.any():
            left = np.sort(left)
        layer, left = left[:num], left[num:]
        dealt[np.lexsort((total, -missing)), i] = layer
        total += cost[dealt[:, i]]
        held += images[dealt[:, i]]
    return dealt


@compiled
def _next_free(after: Ints, place: int) -> int:
    """The first place at or after `place` that is free; after[p] == p for free places."""
    end = place
    while after[end] != end:
        end = int(after[end])
    while after[place] != end:
        following = int(after[place])
        after[place] = end
        place = following
    return end


@compiled
def fill_cells(cost: Ints, domain: int, per_cell: int) -> Ints:
    """[cells, packs per cell] places: costs fall; cell after cell is filled.

    A cell takes the costliest pack left, then the costliest that fit below the cap of its block;
    where none fits, the cheapest pack left.
    """
    count = len(cost)
    cells = np.empty((count // per_cell, per_cell), dtype=np.int64)
    after = np.arange(count + 1)
    before = np.arange(count + 1)  # the same for the last free place before: place p is p + 1
    left = int(cost.sum())
    cap = 0
    for cell in range(len(cells)):
        if cell % domain == 0:
            cap = int(cost[_next_free(after, 0)])
            last = count
            for _ in range(per_cell - 1):
                last = _last_free(before, last) - 1
                cap += int(cost[last])
            cap = max(cap, -(-left // (len(cells) - cell)))
        room = cap
        for j in range(per_cell):
            keep = 0
            last = count
            for _ in range(per_cell - 1 - j):
                last = _last_free(before, last) - 1
                keep += int(cost[last])
            low = 0
            high = count
            while low < high and j > 0:
                middle = (low + high) // 2
                if cost[middle] <= room - keep:
                    high = middle
                else:
                    low = middle + 1
            place = _next_free(after, low)
            if place == count:
                place = _last_free(before, count) - 1
            cells[cell, j] = place
            after[place] = place + 1
            before[place + 1] = place
            room -= int(cost[place])
            left -= int(cost[place])
    return cells


@compiled
def _last_free(before: Ints, place: int) -> int:
    end = place
    while before[end] != end:
        end = int(before[end])
    while before[place] != end:
        following = int(before[place])
        before[place] = end
        place = following
    return end


def _sorted_cells(cost: Ints, places: Ints) -> Ints:
    """Cells by falling cost, cut into blocks anew."""
    cells = places.reshape(-1, places.shape[-1])
    falling = np.argsort(-_cells(cost, cells), kind="stable")
    return cells[falling].reshape(places.shape)


def _named(places: Ints, order: Ints, cost: Ints, images: Ints) -> Ints:
    """Pack numbers of places. Packs of equal cost and images go by turns to the blocks' order."""
    flat = places.ravel()
    rank = np.lexsort((np.arange(len(flat)) // places[0].size, -images[flat], -cost[flat]))
    named = np.empty_like(flat)
    named[rank] = order
    return named.reshape(places.shape)
