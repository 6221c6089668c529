"""Which pack of a step goes to which cell of its grid: least waiting first, then least movement.

Invariants: the result is a permutation of the step's packs over the cells; it depends on the
arguments alone; every comparison that decides is on integers, ties go to the lowest pack, rank or
domain. At `sync_domain` = DP size and one pack a cell the sum over micro-steps of the costliest
rank is the least possible, whatever the tolerance; movement is saved only within it.

Steps. (1) Order packs by falling cost; among equal costs by turns of `ranks_per_node` packs of each
home, so that rows of equal packs hold as many of each home as its node has ranks. (2) Cut the order
into blocks, one a micro-step of a sync domain. With k packs a cell a block is k layers; each layer
gives every cell one pack, the heaviest to the lightest cell, so cells of a block end up even. (3)
One domain: blocks are rows; by falling spread, each row's heaviest cell goes to the rank with the
smallest total. Several: blocks go to domains by their peaks. (4) Swaps bring packs home. (5)
Micro-steps are ordered by rising cost, so those without images come first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core import bounds
from dataservice.core.bounds import Costs
from dataservice.core.swaps import swap_between_blocks, swap_in_rows

Ints = NDArray[np.int64]

_TOTAL_BITS = 61  # sums of costs stay below 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each of M packs goes, and what that achieves. Values are ints where costs are."""

    micro_step: NDArray[np.int64]
    """int64 [M], 0..micro_steps-1."""
    dp_rank: NDArray[np.int64]
    """int64 [M], 0..dp_size-1."""
    lockstep: float
    """Sum over micro-steps of the costliest rank's cell."""
    lockstep_bound: float
    sync: float
    """Largest sum, over domains, of their micro-steps' costliest cells: what the step waits for."""
    sync_bound: float
    end: float
    """Largest total of a rank."""
    end_bound: float
    """Of any placement; with one domain, of any placement with the same rows."""
    moved: int
    """Packs on a rank that is not on their home node; packs without a home are not counted."""
    moved_bound: int
    """With one domain: the least for the same rows. Otherwise the least of any placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    ranks: int
    steps: int
    per_node: int
    domain: int
    per_cell: int

    @property
    def num_packs(self) -> int:
        return self.ranks * self.steps * self.per_cell

    @property
    def num_domains(self) -> int:
        return self.ranks // self.domain


@dataclass(frozen=True, kw_only=True, slots=True)
class _Units:
    """Cells' contents before they have a rank; unit u of block b is number b * domain + i."""

    members: NDArray[np.int64]
    """[units, packs per cell] pack numbers."""
    cost: NDArray[np.int64]
    """[units]"""


def assign(
    cost: ArrayLike,
    home: ArrayLike,
    *,
    dp_size: int,
    micro_steps: int,
    ranks_per_node: int = 1,
    sync_domain: int | None = None,
    tolerance: float = 0.01,
    packs_per_cell: int = 1,
) -> Assignment:
    """Place M = dp_size * micro_steps * packs_per_cell packs on the grid.

    `cost` [M]: integers preferred, floats are rounded to 2**-60 of M times the largest where sums
    decide. `home` [M]: node numbers, a rank's node being dp_rank // ranks_per_node; anything that
    is not such a node counts as -1, nowhere. `sync_domain` E: ranks that meet at every micro-step,
    None = dp_size. `tolerance`: how far above the balance found (rank totals for E = dp_size,
    domains' sums for smaller E) swaps may go to save movement, as a share of it. ValueError for
    wrong sizes, costs that are negative or not finite (with the pack numbers), an E or
    ranks_per_node that does not divide dp_size.
    """
    grid = _checked_grid(dp_size, micro_steps, ranks_per_node, sync_domain, packs_per_cell)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}; it must be a finite number of at least 0")
    exact = _checked_cost(cost, grid.num_packs)
    homes = _checked_home(home, grid)
    units = _units(_blocks(exact, homes, grid), _integer_cost(exact), grid)
    if grid.num_domains == 1:
        place = _place_rows(units, homes, grid, tolerance)
    else:
        place = _place_blocks(units, homes, grid, tolerance)
    return _result(place, units, exact, homes, grid)


def arrival(num_packs: int, *, dp_size: int, packs_per_cell: int = 1) -> tuple[Ints, Ints]:
    """(micro_step, dp_rank) of packs dealt in arrival order, the comparison to every placement."""
    cell = np.arange(num_packs, dtype=np.int64) // packs_per_cell
    return cell // dp_size, cell % dp_size


def lockstep_of(
    cost: ArrayLike, micro_step: Ints, dp_rank: Ints, *, dp_size: int, micro_steps: int
) -> float:
    """Sum over micro-steps of the costliest rank's cell, for any placement."""
    cells = np.zeros((micro_steps, dp_size), dtype=np.asarray(cost).dtype)
    np.add.at(cells, (micro_step, dp_rank), np.asarray(cost))
    value: float = cells.max(axis=1).sum().item()
    return value


# ---- arguments ----------------------------------------------------------------------------------


def _checked_grid(
    dp_size: int, micro_steps: int, ranks_per_node: int, sync_domain: int | None, per_cell: int
) -> _Grid:
    domain = dp_size if sync_domain is None else sync_domain
    for name, value in (
        ("dp_size", dp_size),
        ("micro_steps", micro_steps),
        ("packs_per_cell", per_cell),
        ("ranks_per_node", ranks_per_node),
        ("sync_domain", domain),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name, value in (("ranks_per_node", ranks_per_node), ("sync_domain", domain)):
        if dp_size % value:
            raise ValueError(f"{name} is {value}, which does not divide dp_size {dp_size}")
    return _Grid(
        ranks=dp_size,
        steps=micro_steps,
        per_node=ranks_per_node,
        domain=domain,
        per_cell=per_cell,
    )


def _checked_cost(cost: ArrayLike, num_packs: int) -> Costs:
    raw = np.asarray(cost)
    if raw.shape != (num_packs,):
        raise ValueError(f"cost has shape {raw.shape}; the grid has {num_packs} cells' packs")
    if raw.dtype.kind not in "iufb":
        raise ValueError(f"cost has dtype {raw.dtype}; it must hold numbers")
    bad = np.flatnonzero(~np.isfinite(raw) | (raw < 0))
    if bad.size:
        named = ", ".join(f"{i} ({raw[i]})" for i in bad[:8].tolist())
        more = f" and {bad.size - 8} more" if bad.size > 8 else ""
        raise ValueError(f"cost must be finite and not negative; wrong in packs {named}{more}")
    whole = raw.dtype.kind != "f" or bool((raw == np.rint(raw)).all())
    if whole and float(raw.sum(dtype=np.float64)) < 2.0**_TOTAL_BITS:
        return raw.astype(np.int64)
    return raw.astype(np.float64)


def _checked_home(home: ArrayLike, grid: _Grid) -> Ints:
    raw = np.asarray(home)
    if raw.shape != (grid.num_packs,):
        raise ValueError(f"home has shape {raw.shape}; there are {grid.num_packs} packs")
    if raw.dtype.kind not in "iu":
        raise ValueError(f"home has dtype {raw.dtype}; it must hold node numbers")
    nodes = grid.ranks // grid.per_node
    known = (raw >= 0) & (raw < nodes)
    return np.where(known, raw, -1).astype(np.int64)


def _integer_cost(exact: Costs) -> Ints:
    """Costs as integers whose sum fits; floats are scaled by a power of two and rounded."""
    if exact.dtype.kind == "i":
        return exact.astype(np.int64)
    exponent = math.frexp(float(exact.max()))[1]
    shift = _TOTAL_BITS - exponent - len(exact).bit_length()
    return np.rint(np.ldexp(exact, shift)).astype(np.int64)


# ---- pass 1: blocks -----------------------------------------------------------------------------


def _blocks(exact: Costs, homes: Ints, grid: _Grid) -> Ints:
    """[blocks, packs per cell * domain] pack numbers: blocks by falling cost, and so inside each.

    Equal costs go by turns of a cell layer's share of each home: a block gets whole turns of
    `per_node * per_cell` packs, each of its layers `per_node`.
    """
    packs = np.arange(len(homes))
    falling = -exact
    grouped = np.lexsort((packs, homes, falling))
    same = np.zeros(len(packs), dtype=bool)
    same[1:] = (np.diff(falling[grouped]) == 0) & (np.diff(homes[grouped]) == 0)
    starts = np.maximum.accumulate(np.where(same, 0, packs))
    turn = np.empty(len(packs), dtype=np.int64)
    turn[grouped] = (packs - starts) // grid.per_node
    order = np.lexsort((packs, homes, turn // grid.per_cell, falling))
    size = grid.per_cell * grid.domain
    block = np.empty(len(packs), dtype=np.int64)
    block[order] = packs // size
    inside = np.lexsort((packs, homes, turn, falling, block)).astype(np.int64)
    return inside.reshape(-1, size)


def _units(blocks: Ints, work: Ints, grid: _Grid) -> _Units:
    layers = blocks.reshape(-1, grid.per_cell, grid.domain)
    members = np.empty((len(blocks), grid.domain, grid.per_cell), dtype=np.int64)
    totals = np.zeros((len(blocks), grid.domain), dtype=np.int64)
    for i in range(grid.per_cell):
        lightest = np.argsort(totals, axis=1, kind="stable")
        placed = np.empty_like(totals)
        np.put_along_axis(placed, lightest, layers[:, i], axis=1)
        members[:, :, i] = placed
        totals += work[placed]
    return _Units(members=members.reshape(-1, grid.per_cell), cost=totals.reshape(-1))


# ---- one domain: rows ---------------------------------------------------------------------------


def _place_rows(units: _Units, homes: Ints, grid: _Grid, tolerance: float) -> Ints:
    """place[micro-step, rank] = unit."""
    costs = units.cost.reshape(grid.steps, grid.ranks)
    by_spread = _by_spread(costs)
    widest = int(by_spread[0])
    first = _row_by_home(widest, costs[widest], units, homes, grid)
    place = _deal(costs, by_spread, first) + np.arange(grid.steps)[:, None] * grid.ranks
    total = units.cost[place].sum(axis=0)
    limit = _limit(max(int(total.max()), -(-int(total.sum()) // grid.ranks)), tolerance)
    rising = by_spread[::-1].copy()
    swap_in_rows(
        place, units.cost, units.members, homes, grid.per_node, total, limit, rising, _PASSES
    )
    moved = _moved_by_step(place, units, homes, grid)
    by_cost = np.lexsort((np.arange(grid.steps), moved, costs.max(axis=1)))
    return place[by_cost]


def _by_spread(costs: Ints) -> Ints:
    """Rows of `costs` by falling difference between their largest and smallest."""
    return np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable")


def _deal(costs: Ints, rows: Ints, first: Ints) -> Ints:
    """column[row, slot]: which item of each row goes to which slot, one of every row to each slot.

    Rows are dealt in the order of `rows`, the first as given, of the others the heaviest item to
    the slot with the smallest total.
    """
    falling = np.argsort(-costs, axis=1, kind="stable")
    column = np.empty_like(costs)
    column[rows[0]] = first
    total = costs[rows[0]][first]
    for row in rows[1:]:
        column[row, np.argsort(total, kind="stable")] = falling[row]
        total = total + costs[row][column[row]]
    return column


def _row_by_home(row: int, costs: Ints, units: _Units, homes: Ints, grid: _Grid) -> Ints:
    """Items of a row by rank: to a free rank of the node of its first pack while there is one."""
    free = [list(range(n, n + grid.per_node)) for n in range(0, grid.ranks, grid.per_node)]
    node_of = homes[units.members[row * grid.ranks : (row + 1) * grid.ranks, 0]].tolist()
    at = np.full(grid.ranks, -1, dtype=np.int64)
    rest = []
    for item in np.argsort(-costs, kind="stable").tolist():
        node = node_of[item]
        if node >= 0 and free[node]:
            at[free[node].pop(0)] = item
        else:
            rest.append(item)
    at[at < 0] = rest
    return at


# ---- several domains: blocks --------------------------------------------------------------------


def _place_blocks(units: _Units, homes: Ints, grid: _Grid, tolerance: float) -> Ints:
    """place[micro-step, rank] = unit."""
    peaks = units.cost.reshape(-1, grid.domain).max(axis=1)
    falling = np.argsort(-peaks, kind="stable")
    by_step = falling[_blocks_of_domains(peaks[falling], grid)]
    inside = np.arange(grid.domain, dtype=np.int64)
    place = (by_step[:, :, None] * grid.domain + inside).reshape(grid.steps, grid.ranks)
    limit = _limit(int(peaks[by_step].sum(axis=0).max()), tolerance)
    swap_between_blocks(
        place, units.cost, units.members, homes, grid.per_node, grid.domain, limit, _PASSES
    )
    return _domains_by_cost(place, grid, units)


def _blocks_of_domains(peaks: Ints, grid: _Grid) -> Ints:
    """block[micro-step, domain] for blocks of falling peaks: the better of two rules.

    Heaviest block to the lightest domain with a free micro-step suits few heavy blocks; rows of one
    block for each domain suit peaks that differ little.
    """
    slots: list[list[int]] = [[] for _ in range(grid.num_domains)]
    loads = [(0, 0, d) for d in range(grid.num_domains)]
    for block, peak in enumerate(peaks.tolist()):
        load, used, domain = heapq.heappop(loads)
        slots[domain].append(block)
        if used + 1 < grid.steps:
            heapq.heappush(loads, (load + peak, used + 1, domain))
    free = np.array(slots, dtype=np.int64).T
    costs = peaks.reshape(grid.steps, grid.num_domains)
    rows = np.arange(grid.steps, dtype=np.int64)[:, None] * grid.num_domains
    dealt = rows + _deal(costs, _by_spread(costs), np.arange(grid.num_domains, dtype=np.int64))
    return min((free, dealt), key=lambda blocks: int(peaks[blocks].sum(axis=0).max()))


def _domains_by_cost(place: Ints, grid: _Grid, units: _Units) -> Ints:
    """Each domain's micro-steps by rising peak."""
    cells = units.cost[place].reshape(grid.steps, grid.num_domains, grid.domain)
    peaks = cells.max(axis=2)
    ordered = np.empty_like(place).reshape(cells.shape)
    shaped = place.reshape(cells.shape)
    for d in range(grid.num_domains):
        ordered[:, d] = shaped[np.argsort(peaks[:, d], kind="stable"), d]
    return ordered.reshape(place.shape)


# ---- result -------------------------------------------------------------------------------------

_PASSES = 4


def _limit(found: int, tolerance: float) -> int:
    return found + math.floor(found * Fraction(tolerance))


def _moved_by_step(place: Ints, units: _Units, homes: Ints, grid: _Grid) -> Ints:
    node = np.arange(grid.ranks) // grid.per_node
    held = homes[units.members[place]]  # [micro-step, rank, packs per cell]
    away = (held >= 0) & (held != node[None, :, None])
    moved: Ints = away.sum(axis=(1, 2))
    return moved


def _result(
    place: Ints,
    units: _Units,
    exact: Costs,
    homes: Ints,
    grid: _Grid,
) -> Assignment:
    held = units.members[place]  # [micro-step, rank, packs per cell]
    micro_step = np.empty(grid.num_packs, dtype=np.int64)
    dp_rank = np.empty(grid.num_packs, dtype=np.int64)
    micro_step[held] = np.arange(grid.steps)[:, None, None]
    dp_rank[held] = np.arange(grid.ranks)[None, :, None]
    cells = exact[held].sum(axis=2)
    by_domain = cells.reshape(grid.steps, grid.num_domains, grid.domain).max(axis=2)
    one_domain = grid.num_domains == 1
    return Assignment(
        micro_step=micro_step,
        dp_rank=dp_rank,
        lockstep=cells.max(axis=1).sum().item(),
        lockstep_bound=bounds.lockstep(exact, grid.ranks, grid.per_cell),
        sync=by_domain.sum(axis=0).max().item(),
        sync_bound=bounds.sync(exact, grid.ranks, grid.domain, grid.steps, grid.per_cell),
        end=cells.sum(axis=0).max().item(),
        end_bound=bounds.end_of_rows(cells)
        if one_domain
        else bounds.end(exact, grid.ranks, grid.steps * grid.per_cell),
        moved=int(_moved_by_step(place, units, homes, grid).sum()),
        moved_bound=bounds.moved(
            homes[held.reshape(grid.steps, -1)] if one_domain else homes[None, :],
            grid.ranks // grid.per_node,
            grid.per_node * grid.per_cell * (1 if one_domain else grid.steps),
        ),
    )
