"""The terms of a micro-batch's cost equal those recomputed from its packs."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from trainer_client import PackStream, ParallelLayout, cost_terms
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.testing import (
    FAKE_INFO,
    FakePack,
    FakeService,
    padding_pack,
    synthetic_packs,
)


def build(packs: list[FakePack]) -> MicroBatch:
    return build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VisionInfo.of(FAKE_INFO),
    )


def recomputed(packs: list[FakePack]) -> dict[str, int]:
    images = [t * h * w for pack in packs for t, h, w in pack.arrays["image_grid_thw"].tolist()]
    documents = [
        stop - start
        for pack in packs
        for start, stop in itertools.islice(
            itertools.pairwise(pack.arrays["cu_seqlens"].tolist()), pack.meta["num_docs"]
        )
    ]
    return {
        "patches": sum(images),
        "patches_squared": sum(p * p for p in images),
        "length_squared": sum(length * length for length in documents),
    }


@pytest.mark.parametrize("packs_per_cell", [1, 2, 3])
def test_terms_are_those_of_the_packs(packs_per_cell: int) -> None:
    packs = synthetic_packs(12, seed=4, image_share=0.5)
    assert any(pack.arrays["cu_seqlens"].size == pack.meta["num_docs"] + 2 for pack in packs)
    for first in range(0, 12, packs_per_cell):
        cell = packs[first : first + packs_per_cell]
        assert cost_terms(build(cell)) == recomputed(cell)


def test_a_tile_attends_alone() -> None:
    info = dataclasses.replace(FAKE_INFO, pack_length=256, tile=4, thumbnail=True, tile_tokens=3)
    pack = synthetic_packs(1, image_share=1.0, info=info)[0]
    batch = build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VisionInfo.of(info),
    )
    terms, tiles = cost_terms(batch), len(pack.arrays["pixel_values"])
    assert (terms["patches"], terms["patches_squared"]) == (4 * tiles, 16 * tiles)


def test_padding_and_text_cost_no_patches_and_padding_nothing() -> None:
    assert set(cost_terms(build([padding_pack()])).values()) == {0}
    text = cost_terms(build(synthetic_packs(1, image_share=0.0)))
    assert (text["patches"], text["patches_squared"]) == (0, 0)
    assert text["length_squared"] > 0


def test_large_terms_do_not_overflow() -> None:
    batch = build([padding_pack()])
    batch["cu_seqlens"] = batch["cu_seqlens"].new_tensor([0, 2_000_000])
    batch["doc_lengths"] = batch["doc_lengths"].new_tensor([2_000_000])
    batch["doc_ids"] = batch["doc_ids"].new_zeros(2_000_000)
    batch["image_grid_thw"] = batch["image_grid_thw"].new_tensor([[4, 1000, 1000]])
    assert cost_terms(batch) == {
        "patches": 4_000_000,
        "patches_squared": 16 * 10**12,
        "length_squared": 4 * 10**12,
    }


def test_batches_of_a_stream_make_rows_of_a_log() -> None:
    packs = synthetic_packs(8, seed=2)
    with FakeService(packs) as service:
        stream = PackStream(
            service.endpoint, job="times", layout=ParallelLayout.data_parallel(0, 1), micro_steps=2
        )
        with stream:
            rows = [json.loads(json.dumps(cost_terms(batch))) for batch in stream]
    assert sorted(map(str, rows)) == sorted(str(recomputed([pack])) for pack in packs)
