"""Which pack of a step goes to which cell of its grid: least waiting first, then least movement.

Invariants: the result is a permutation of the step's packs over the cells; it depends on the
arguments alone; every comparison that decides is on integers, ties go to the lowest pack, rank or
domain. At `sync_domain` = DP size and one pack a cell the sum over micro-steps of the costliest
rank is the least possible, whatever the tolerance; movement is saved only within it.

Steps. (1) Packs are grouped into cells and blocks, one block a micro-step of a sync domain
(`blocks`). (2) One domain: blocks are rows; by falling spread, each row's costliest cell goes to
the rank with the smallest total. Several: blocks go to domains by their peaks. Swaps then even out
the totals. (3) Swaps bring packs home. (4) Micro-steps are ordered by rising cost, so those without
images come first.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.balance import bounds
from dataservice.core.balance.blocks import Step
from dataservice.core.balance.placing import away, place_blocks, place_rows

Ints = NDArray[np.int64]

_TOTAL_BOUND = 2.0**61  # with the tolerance and rounding, sums of costs stay below 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each of M packs goes, and what that achieves beside what is the least possible."""

    micro_step: NDArray[np.int64]
    """int64 [M], 0..micro_steps-1."""
    dp_rank: NDArray[np.int64]
    """int64 [M], 0..dp_size-1."""
    lockstep: int
    """Sum over micro-steps of the costliest rank's cell."""
    lockstep_bound: int
    sync: int
    """Largest sum, over domains, of their micro-steps' costliest cells: what the step waits for."""
    sync_bound: int
    end: int
    """Largest total of a rank."""
    end_bound: int
    """Of any placement; with one domain, of any placement with the same rows of cells."""
    moved: int
    """Packs on a rank that is not on their home node; packs without a home are not counted."""
    moved_bound: int
    """With one domain: the least for the same rows. Otherwise the least of any placement."""
    moved_bytes: int | None
    """Bytes of the moved packs; None without `size_bytes`."""
    moved_bytes_bound: int | None
    """As `moved_bound`."""


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
    num_images: ArrayLike | None = None,
    min_images_per_rank: int = 0,
    size_bytes: ArrayLike | None = None,
) -> Assignment:
    """Place M = dp_size * micro_steps * packs_per_cell packs on the grid.

    `cost` [M]: whole numbers whose sum is below 2**61. `home` [M]: node numbers, a rank's node
    being dp_rank // ranks_per_node; anything that is not such a node counts as -1, nowhere.
    `sync_domain` E: ranks that meet at every micro-step, None = dp_size. `tolerance`: how far above
    the lower bound (rank totals for E = dp_size, domains' sums for smaller E) swaps may go to save
    movement, as a share of it; where the bound is not reached within it, how far above the balance
    found. With several packs a cell it also is how far a row's costliest cell may grow.

    `num_images` [M], `min_images_per_rank`: with several packs a cell, cells with fewer images are
    avoided first, balance counts second; one pack a cell leaves no choice. `size_bytes` [M]: what
    moving a pack takes, only reported. ValueError for wrong sizes, values that are negative, not
    whole or not finite (with the pack numbers), an E or ranks_per_node that does not divide
    dp_size.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}; it must be a finite number of at least 0")
    step = _checked(
        cost,
        home,
        num_images,
        dp_size=dp_size,
        micro_steps=micro_steps,
        ranks_per_node=ranks_per_node,
        sync_domain=sync_domain,
        packs_per_cell=packs_per_cell,
        min_images_per_rank=min_images_per_rank,
    )
    return _result(_placed(step, Fraction(tolerance)), step, size_bytes)


def _placed(step: Step, tolerance: Fraction) -> Ints:
    """[micro-step, rank, packs per cell] pack numbers."""
    if step.num_domains == 1:
        return place_rows(step, tolerance)
    if step.domain > 1 or step.per_cell == 1 or step.min_images:
        return place_blocks(step, tolerance)
    # A rank that meets no other waits for nothing in its cells: its packs are placed one by one.
    single = dataclasses.replace(step, steps=step.steps * step.per_cell, per_cell=1)
    held = place_blocks(single, tolerance).reshape(step.steps, step.per_cell, step.ranks)
    return held.transpose(0, 2, 1)


def evaluate(
    cost: ArrayLike,
    home: ArrayLike,
    micro_step: ArrayLike,
    dp_rank: ArrayLike,
    *,
    dp_size: int,
    micro_steps: int,
    ranks_per_node: int = 1,
    sync_domain: int | None = None,
    packs_per_cell: int = 1,
    size_bytes: ArrayLike | None = None,
) -> Assignment:
    """What a placement made elsewhere achieves, beside the same bounds; arguments as `assign`.

    ValueError where micro_step [M], dp_rank [M] do not put packs_per_cell packs in every cell.
    """
    step = _checked(
        cost,
        home,
        None,
        dp_size=dp_size,
        micro_steps=micro_steps,
        ranks_per_node=ranks_per_node,
        sync_domain=sync_domain,
        packs_per_cell=packs_per_cell,
        min_images_per_rank=0,
    )
    steps, ranks = np.asarray(micro_step), np.asarray(dp_rank)
    for name, values, end in (("micro_step", steps, micro_steps), ("dp_rank", ranks, dp_size)):
        if values.shape != step.cost.shape or values.dtype.kind not in "iu":
            raise ValueError(f"{name} must hold {len(step.cost)} integers, one a pack")
        if ((values < 0) | (values >= end)).any():
            raise ValueError(f"{name} must be within 0..{end - 1}")
    cell = steps.astype(np.int64) * dp_size + ranks
    wrong = np.flatnonzero(np.bincount(cell, minlength=step.num_cells) != packs_per_cell)
    if wrong.size:
        at, rank = divmod(int(wrong[0]), dp_size)
        raise ValueError(
            f"{wrong.size} cells do not hold packs_per_cell = {packs_per_cell} packs, the first is "
            f"micro-step {at}, rank {rank}"
        )
    by_cell = np.argsort(cell, kind="stable").astype(np.int64)
    return _result(by_cell.reshape(micro_steps, dp_size, packs_per_cell), step, size_bytes)


def arrival(num_packs: int, *, dp_size: int, packs_per_cell: int = 1) -> tuple[Ints, Ints]:
    """(micro_step, dp_rank) of packs dealt in arrival order, the comparison to every placement."""
    cell = np.arange(num_packs, dtype=np.int64) // packs_per_cell
    return cell // dp_size, cell % dp_size


def lockstep_of(
    cost: Ints, micro_step: Ints, dp_rank: Ints, *, dp_size: int, micro_steps: int
) -> int:
    """Sum over micro-steps of the costliest rank's cell, for any placement."""
    cells = np.zeros((micro_steps, dp_size), dtype=np.int64)
    np.add.at(cells, (micro_step, dp_rank), cost)
    return int(cells.max(axis=1).sum())


# ---- arguments ----------------------------------------------------------------------------------


def _checked(
    cost: ArrayLike,
    home: ArrayLike,
    num_images: ArrayLike | None,
    *,
    dp_size: int,
    micro_steps: int,
    ranks_per_node: int,
    sync_domain: int | None,
    packs_per_cell: int,
    min_images_per_rank: int,
) -> Step:
    domain = dp_size if sync_domain is None else sync_domain
    for name, value in (
        ("dp_size", dp_size),
        ("micro_steps", micro_steps),
        ("packs_per_cell", packs_per_cell),
        ("ranks_per_node", ranks_per_node),
        ("sync_domain", domain),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name, value in (("ranks_per_node", ranks_per_node), ("sync_domain", domain)):
        if dp_size % value:
            raise ValueError(f"{name} is {value}, which does not divide dp_size {dp_size}")
    if min_images_per_rank < 0 or (min_images_per_rank and num_images is None):
        raise ValueError(
            f"min_images_per_rank is {min_images_per_rank}; it must be at least 0 and needs "
            "num_images where it is not 0"
        )
    num_packs = dp_size * micro_steps * packs_per_cell
    images = _checked_counts("num_images", num_images, num_packs)
    return Step(
        cost=_checked_cost(cost, num_packs),
        home=_checked_home(home, num_packs, dp_size // ranks_per_node),
        images=np.zeros(num_packs, dtype=np.int64)
        if images is None
        else np.minimum(images, min_images_per_rank),
        min_images=min_images_per_rank,
        ranks=dp_size,
        steps=micro_steps,
        per_node=ranks_per_node,
        domain=domain,
        per_cell=packs_per_cell,
    )


def _checked_cost(cost: ArrayLike, num_packs: int) -> Ints:
    raw = np.asarray(cost)
    if raw.shape != (num_packs,):
        raise ValueError(f"cost has shape {raw.shape}; the grid has {num_packs} cells' packs")
    if raw.dtype.kind not in "iufb":
        raise ValueError(f"cost has dtype {raw.dtype}; it must hold numbers")
    wrong = raw < 0
    if raw.dtype.kind == "f":
        wrong |= ~np.isfinite(raw) | (raw != np.rint(raw))
    _refuse("cost must hold whole numbers of at least 0", raw, wrong)
    total = float(raw.sum(dtype=np.float64))
    if total >= _TOTAL_BOUND:
        raise ValueError(
            f"cost adds up to {total:g}, which must be below 2**61; use a coarser unit"
        )
    return raw.astype(np.int64, copy=False)


def _refuse(rule: str, values: NDArray[np.generic], wrong: NDArray[np.bool_]) -> None:
    bad = np.flatnonzero(wrong)
    if bad.size:
        named = ", ".join(f"{i} ({values[i]})" for i in bad[:8].tolist())
        more = f" and {bad.size - 8} more" if bad.size > 8 else ""
        raise ValueError(f"{rule}; wrong in packs {named}{more}")


def _checked_home(home: ArrayLike, num_packs: int, nodes: int) -> Ints:
    raw = np.asarray(home)
    if raw.shape != (num_packs,):
        raise ValueError(f"home has shape {raw.shape}; there are {num_packs} packs")
    if raw.dtype.kind not in "iu":
        raise ValueError(f"home has dtype {raw.dtype}; it must hold node numbers")
    known = (raw >= 0) & (raw < nodes)
    return np.where(known, raw, np.int64(-1)).astype(np.int64, copy=False)


def _checked_counts(name: str, values: ArrayLike | None, num_packs: int) -> Ints | None:
    if values is None:
        return None
    raw = np.asarray(values)
    if raw.shape != (num_packs,):
        raise ValueError(f"{name} has shape {raw.shape}; there are {num_packs} packs")
    if raw.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {raw.dtype}; it must hold integers")
    _refuse(f"{name} must not be negative", raw, raw < 0)
    return raw.astype(np.int64, copy=False)


# ---- result -------------------------------------------------------------------------------------


def _result(held: Ints, step: Step, size_bytes: ArrayLike | None) -> Assignment:
    """`held` [micro-step, rank, packs per cell]: pack numbers."""
    cost = step.cost
    sizes = _checked_counts("size_bytes", size_bytes, len(cost))
    micro_step = np.empty(len(cost), dtype=np.int64)
    dp_rank = np.empty(len(cost), dtype=np.int64)
    micro_step[held] = np.arange(step.steps)[:, None, None]
    dp_rank[held] = np.arange(step.ranks)[None, :, None]
    cells = cost[held].sum(axis=2)
    by_domain = cells.reshape(step.steps, step.num_domains, step.domain).max(axis=2)
    one_domain = step.num_domains == 1
    moved = away(held, step)
    rows = held.reshape(step.steps if one_domain else 1, -1)
    nodes = step.ranks // step.per_node
    room = rows.shape[1] // nodes
    return Assignment(
        micro_step=micro_step,
        dp_rank=dp_rank,
        lockstep=int(cells.max(axis=1).sum()),
        lockstep_bound=bounds.lockstep(cost, step.ranks, step.per_cell),
        sync=int(by_domain.sum(axis=0).max()),
        sync_bound=bounds.sync(cost, step.ranks, step.domain, step.steps, step.per_cell),
        end=int(cells.sum(axis=0).max()),
        end_bound=bounds.end_of_rows(cells)
        if one_domain
        else bounds.end(cost, step.ranks, step.steps * step.per_cell),
        moved=int(moved.sum()),
        moved_bound=bounds.moved(step.home[rows], nodes, room),
        moved_bytes=None if sizes is None else int(sizes[held[moved]].sum()),
        moved_bytes_bound=None
        if sizes is None
        else bounds.moved_bytes(step.home[rows], sizes[rows], nodes, room),
    )
