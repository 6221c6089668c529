"""Placement changes who computes what, not what is learnt: 2 and 4 ranks, float64, 50 steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from client.equivalence_ranks import MICRO_STEPS, MOST_TOKENS, PACKS_PER_CELL
from numpy.typing import NDArray
from support.ranks import run_ranks

from dataservice.core.settings import Grid
from trainer_client.testing import (
    FAKE_INFO,
    FakePack,
    FakeService,
    balanced,
    padding_pack,
    synthetic_packs,
    with_hole,
)
from trainer_client.testing.synthetic import Arrays

STEPS = 50
CONTROL_STEPS = 10
WAYS = ("balanced", "rebalanced", "rebalanced synchronously", "segregated")
"""To place the packs; all beside arrival order. Segregated ones hold the same documents."""
Runs = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By rank: arrival, each of WAYS, and those whose loss is a mean over micro-batches."""
    ranks: int = request.param
    grid = Grid(dp_size=ranks, micro_steps=MICRO_STEPS, packs_per_cell=PACKS_PER_CELL)
    packs = global_batches(grid)
    with (
        FakeService(packs) as arrival,
        FakeService(packs, placement=balanced) as placed,
        FakeService(segregated(packs, grid), info=LONGER) as apart,
    ):
        own, plain = {"rebalance": True, "steps": STEPS}, {"steps": STEPS}
        wanted: dict[str, Any] = {
            "arrival": (arrival.endpoint, plain),
            "balanced": (placed.endpoint, plain),
            "rebalanced": (arrival.endpoint, own | {"overlap": True}),
            "segregated": (apart.endpoint, plain),
        }
        if ranks == 2:
            in_turn = own | {"overlap": False}
            control = {"mean": True, "steps": CONTROL_STEPS}
            wanted["rebalanced synchronously"] = (arrival.endpoint, in_turn)
            wanted["arrival, mean"] = (arrival.endpoint, control)
            wanted["balanced, mean"] = (placed.endpoint, control)
            wanted["rebalanced, mean"] = (arrival.endpoint, in_turn | control)
        folder = tmp_path_factory.mktemp(f"equivalence{ranks}")
        return run_ranks("client.equivalence_ranks:all_runs", ranks, folder, wanted)


def ways(runs: Runs) -> list[str]:
    return [way for way in WAYS if way in runs[0]]


# ---- packs --------------------------------------------------------------------------------------


def global_batches(grid: Grid) -> list[FakePack]:
    """Packs with and without images, and one with a hole; every step ends with one of padding."""
    packs = synthetic_packs((grid.num_packs - 1) * STEPS, seed=5)
    hole = next(i for i, pack in enumerate(packs) if pack.num_images and i > 40)
    packs[hole] = with_hole(packs[hole])
    steps = []
    for first in range(0, len(packs), grid.num_packs - 1):
        steps += [*packs[first : first + grid.num_packs - 1], padding_pack()]
    return steps


def segregated(packs: Sequence[FakePack], grid: Grid) -> list[FakePack]:
    """The documents of every global batch, those without images in packs of their own and first.

    As long a pack as it takes, its documents in another order and other company.
    """
    steps = []
    for first in range(0, len(packs), grid.num_packs):
        step = packs[first : first + grid.num_packs]
        documents = [document for pack in step for document in documents_of(pack)]
        text = [one for one in documents if not len(one["image_grid_thw"])]
        vision = [one for one in documents if len(one["image_grid_thw"])]
        num_text = grid.num_packs // 2
        halves = dealt(text, num_text) + dealt(vision, grid.num_packs - num_text)
        loss_tokens = sum(pack.loss_tokens for pack in step)
        steps += [replace(halves[0], loss_tokens=loss_tokens), *halves[1:]]
    return steps


def documents_of(pack: FakePack) -> list[Arrays]:
    """The arrays of each document by itself."""
    arrays, found = pack.arrays, []
    rows = np.concatenate([[0], np.cumsum(arrays["image_grid_thw"].prod(axis=1, dtype=np.int64))])
    for number in range(pack.meta["num_docs"]):
        start, stop = arrays["cu_seqlens"][number : number + 2]
        images = np.flatnonzero(arrays["image_doc_ids"] == number)
        pixels = [arrays["pixel_values"][rows[i] : rows[i + 1]] for i in images]
        found.append(
            {
                "input_ids": arrays["input_ids"][start:stop],
                "labels": arrays["labels"][start:stop],
                "pixel_values": np.concatenate([arrays["pixel_values"][:0], *pixels]),
                "image_grid_thw": arrays["image_grid_thw"][images],
            }
        )
    return found


def dealt(documents: Sequence[Arrays], num_packs: int) -> list[FakePack]:
    """Each document to the shortest pack, the last one first."""
    held: list[list[Arrays]] = [[] for _ in range(num_packs)]
    for document in reversed(documents):
        lengths = [sum(len(one["input_ids"]) for one in pack) for pack in held]
        held[int(np.argmin(lengths))].append(document)
    return [packed(pack) for pack in held]


def packed(documents: Sequence[Arrays]) -> FakePack:
    """Of MOST_TOKENS, the rest of them padding; planned without loss tokens."""
    lengths = [len(one["input_ids"]) for one in documents]
    filler = padding_pack(replace(FAKE_INFO, pack_length=MOST_TOKENS - sum(lengths))).arrays
    parts = [*documents, filler]
    names = ("input_ids", "labels", "pixel_values", "image_grid_thw")
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in names}
    arrays["doc_lengths"] = np.array([len(part["input_ids"]) for part in parts], np.int32)
    arrays["cu_seqlens"] = np.concatenate([[0], np.cumsum(arrays["doc_lengths"])]).astype(np.int32)
    arrays["image_doc_ids"] = np.repeat(
        np.arange(len(documents), dtype=np.int32), [len(one["image_grid_thw"]) for one in documents]
    )
    meta = {"num_docs": len(documents), "sample_keys": []}
    return FakePack(arrays=arrays, meta=meta, loss_tokens=0)


LONGER = replace(FAKE_INFO, pack_length=MOST_TOKENS)
"""Packs with room for the documents that fall to one."""

# ---- tests --------------------------------------------------------------------------------------


def difference(runs: Runs, way: str, what: str, *, kind: str = "") -> float:
    values: list[NDArray[np.float64]] = [
        np.array(runs[0][name + kind][what]) for name in ("arrival", way)
    ]
    return float(np.abs(values[0] - values[1]).max())


def test_losses_and_weights_are_equal(runs: Runs) -> None:
    assert len(runs[0]["arrival"]["losses"]) == STEPS
    for way in ways(runs):
        assert difference(runs, way, "losses") < 1e-9, way
        assert difference(runs, way, "weights") < 1e-9, way
    for name in ("arrival", *ways(runs)):
        assert all(run[name]["weights"] == runs[0][name]["weights"] for run in runs)
        losses = runs[0][name]["losses"]
        assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_the_same_packs_are_computed_elsewhere(runs: Runs) -> None:
    cells = {name: [cell for run in runs for cell in run[name]["cells"]] for name in runs[0]}
    by_step: dict[str, dict[int, set[Any]]] = {}
    for name, told in cells.items():
        steps = by_step.setdefault(name, {})
        for step, _, pack_ids, digests, *_ in told:
            steps.setdefault(step, set()).update(zip(pack_ids, digests, strict=True))
    arrival = cells["arrival"]
    assert len(arrival) == len(runs) * MICRO_STEPS * STEPS
    for way in ways(runs):
        placed = cells[way]
        assert len(placed) == len(arrival)
        different = sum(a[3] != b[3] for a, b in zip(arrival, placed, strict=True))
        assert different >= len(arrival) / 2, way
        if way != "segregated":
            assert by_step[way] == by_step["arrival"], way
        for cell, other in zip(arrival, placed, strict=True):
            assert cell[0] == other[0] and cell[-1] == other[-1]  # step, planned loss tokens
    for name in ("arrival", "balanced", "rebalanced"):
        assert sum(holes for *_, holes, _ in cells[name]) == 1


def test_segregated_text_has_micro_steps_of_its_own(runs: Runs) -> None:
    told = [cell for run in runs for cell in run["segregated"]["cells"]]
    text = [cell for cell in told if cell[1] == 0]
    assert all(images == 0 and without == len(runs) for *_, images, without, _, _ in text)
    vision = [cell for cell in told if cell[1] == 1]
    assert sum(images > 0 for *_, images, _, _, _ in vision) > 0.9 * len(vision)


def test_a_mean_per_micro_batch_would_differ(runs: Runs) -> None:
    if "arrival, mean" not in runs[0]:
        return
    for way in ("balanced", "rebalanced"):
        assert difference(runs, way, "losses", kind=", mean") > 1e-6
        assert difference(runs, way, "weights", kind=", mean") > 1e-6
