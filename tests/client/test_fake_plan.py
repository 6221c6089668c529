"""A FakeService of a plan: batches are those of the real planner, packs hold the samples given."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.plan import Plan
from dataservice.core.settings import (
    BalanceSettings,
    Grid,
    KindShare,
    Oversize,
    Packer,
    Phase,
    PlanSettings,
    Segregation,
    SourceShare,
)
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError, ResumeRefused
from dataservice.pipeline.patches import patchify
from trainer_client import ParallelLayout
from trainer_client.batch import MicroBatch, VisionInfo, check_pack
from trainer_client.stream import PackStream
from trainer_client.testing import (
    FAKE_PLAN,
    FakeSample,
    FakeService,
    assert_resume_identical,
    made_up_samples,
    read_all,
)
from trainer_client.testing.plan import PlannedPacks
from trainer_client.testing.samples import SampleTable
from trainer_client.testing.synthetic import IMAGE, PAD, VISION_END, VISION_START

SAMPLES = {
    "talks": made_up_samples(120, seed=1, image_share=0.6),
    "texts": made_up_samples(60, seed=2, image_share=0.0),
}
SEGREGATED = dataclasses.replace(
    FAKE_PLAN,
    sources=tuple(SourceShare(name=name) for name in SAMPLES),
    segregate=Segregation(
        text=KindShare(micro_steps=1, packs_per_cell=2), vision=KindShare(micro_steps=2)
    ),
)
PHASES = dataclasses.replace(
    FAKE_PLAN,
    lanes=2,
    window=20,
    phases=(Phase(windows=2, pack_length=192, max_pixels=256), Phase()),
)
TILES = dataclasses.replace(
    FAKE_PLAN,
    vision=VisionRules(patch=2, mode="tiles", tile=4, max_tiles=4, tile_tokens=3),
)


def stream_of(service: FakeService, rank: int = 0, ranks: int = 1, **options: Any) -> PackStream:
    values = {"job": "test", "micro_steps": 3, "device": "cpu", "run_id": "run", **options}
    layout = ParallelLayout.data_parallel(rank, ranks)
    return PackStream(service.endpoint, layout=layout, **values)


def read(service: FakeService, ranks: int = 1, **options: Any) -> list[list[MicroBatch]]:
    streams = [stream_of(service, rank, ranks, **options) for rank in range(ranks)]
    try:
        return read_all(streams)
    finally:
        for stream in streams:
            stream.close()


def keys_of(batches: list[list[MicroBatch]]) -> Counter[str]:
    return Counter(
        key
        for rank in batches
        for batch in rank
        for pack in batch.meta["sample_keys"]
        for key in pack
    )


ALL = Counter(
    f"{name}/memory@{row}" for name, samples in SAMPLES.items() for row in range(len(samples))
)


def test_packs_go_where_the_real_planner_puts_them() -> None:
    sources = tuple(SourceShare(name=name) for name in SAMPLES)
    plan = Plan(dataclasses.replace(FAKE_PLAN, sources=sources), SampleTable(SAMPLES))
    grid = Grid(dp_size=2, micro_steps=3)
    with FakeService.of_plan(SAMPLES) as service:
        ranks = read(service, ranks=2)
    assert keys_of(ranks) == ALL
    cursor, steps = plan.start(), 0
    while (step := plan.step(cursor, grid)) is not None:
        for i in range(step.num_packs):
            place = steps * grid.micro_steps + int(step.micro_step[i])
            batch = ranks[int(step.dp_rank[i])][place]
            assert batch.meta["pack_ids"] == [step.pack_id(i)]
            assert batch.meta["plan_digest"] == plan.digest
            assert batch.meta["loss_tokens"] == step.total_loss_tokens
            assert len(batch["image_grid_thw"]) == step.num_images[i] == batch.meta["num_images"]
        cursor, steps = step.next_cursor, steps + 1
    assert steps * grid.micro_steps == len(ranks[0]) == len(ranks[1])


def test_a_users_texts_and_pixels_arrive_as_they_are() -> None:
    pixels = np.random.Generator(np.random.Philox(3)).integers(0, 256, (8, 12, 3), np.uint8)
    sample = FakeSample(prompt="Is <image> it?", answer="Yes.", images=(pixels,))
    with FakeService.of_plan({"one": [sample]}) as service:
        ((batch,),) = read(service, micro_steps=1)
    length = int(batch["doc_lengths"][0])
    image = [VISION_START, *[IMAGE] * 6, VISION_END]
    ids = [*b"Is ", *image, *b" it?", *b"Yes.", PAD]
    assert batch["input_ids"][:length].tolist() == ids
    answer = len(ids) - len("Yes.") - 1
    assert batch["labels"][:answer].tolist() == [-100] * answer
    assert batch["labels"][answer:length].tolist() == ids[answer:]
    assert batch.meta["loss_tokens"] == 5
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]]
    expected = np.zeros((24, 12), np.uint8)
    patchify(np.ascontiguousarray(pixels.transpose(0, 2, 1)), 2, 2, expected)
    assert torch.equal(batch["pixel_values"], torch.from_numpy(expected))


def test_pixels_are_scaled_to_the_planned_size_and_thumbnails_to_a_tile() -> None:
    plain = np.zeros((30, 50, 3), np.uint8)
    plain[:, 25:] = 200
    sample = FakeSample(prompt="<image>", answer="x", images=(plain,))
    with FakeService.of_plan({"one": [sample]}, TILES) as service:
        ((batch,),) = read(service, micro_steps=1)
    assert batch["num_tiles"].tolist() == [len(batch["pixel_values"])]
    assert batch["image_grid_thw"].prod() + 1 == len(batch["pixel_values"])
    assert set(batch["pixel_values"].unique().tolist()) == {0, 200}
    thumbnail = batch["pixel_values"][-1].view(3, 4, 4)
    assert thumbnail[:, :, :2].max() == 0
    assert thumbnail[:, :, 2:].min() == 200


def test_a_change_of_phase_is_told_one_step_before() -> None:
    with FakeService.of_plan(SAMPLES, PHASES) as service:
        ((*batches,),) = read(service, micro_steps=2)
    lengths = [batch.meta["pack_length"] for batch in batches]
    assert lengths == sorted(lengths)
    assert set(lengths) == {192, 256}
    assert [len(batch["input_ids"]) for batch in batches] == lengths
    for batch, later in zip(batches, batches[2:], strict=False):
        assert batch.meta["next_step"]["pack_length"] == later.meta["pack_length"]
        assert batch.meta["next_step"]["max_pixels"] == later.meta["max_pixels"]
    assert batches[-1].meta["next_step"] is None


def test_kinds_apart_have_micro_steps_of_their_own() -> None:
    with FakeService.of_plan(SAMPLES, SEGREGATED) as service:
        ranks = read(service, ranks=2, micro_steps=3)
    assert keys_of(ranks) == ALL
    for batch in ranks[0]:
        texts = batch.micro_step == 0
        assert batch.meta["num_packs"] == (2 if texts else 1)
        assert not texts or batch.meta["num_images"] == 0


def test_cells_without_images_are_avoided_where_the_plan_says_so() -> None:
    """Half of the packs have images, and each cell holds two."""
    samples = {"talks": made_up_samples(150, seed=7, image_share=0.15)}
    balance = BalanceSettings(enabled=True, min_images_per_rank=1)
    without = []
    for plan in (FAKE_PLAN, dataclasses.replace(FAKE_PLAN, balance=balance)):
        with FakeService.of_plan(samples, plan) as service:
            ranks = read(service, ranks=2, micro_steps=2, packs_per_cell=2)
        without.append(sum(batch.meta["num_images"] == 0 for rank in ranks for batch in rank))
    assert without[0] > without[1]


@pytest.mark.parametrize(
    "plan", [FAKE_PLAN, SEGREGATED, PHASES, TILES, dataclasses.replace(FAKE_PLAN, align=16)]
)
def test_resume_anywhere_is_as_one_run(plan: PlanSettings) -> None:
    small = {name: samples[:40] for name, samples in SAMPLES.items()}
    with FakeService.of_plan(small, plan) as service:
        runs = iter(range(1000))

        def make() -> PackStream:
            return stream_of(service, run_id=f"run{next(runs)}")

        with make() as stream:
            expected = list(stream)
        for cut in (1, len(expected) // 2, len(expected) - 1):
            assert_resume_identical(make, cut, expected)


def test_more_ranks_go_on_where_fewer_stopped() -> None:
    with FakeService.of_plan(SAMPLES) as service:
        with stream_of(service, run_id="first") as stream:
            before = [batch for _, batch in zip(range(6), stream, strict=False)]
            state = stream.state_dict()
        streams = [stream_of(service, rank, 2, run_id="second") for rank in range(2)]
        for stream in streams:
            stream.load_state_dict(state)
        after = read_all(streams)
        for stream in streams:
            stream.close()
    assert keys_of([before, *after]) == ALL


@pytest.mark.parametrize(("remainder", "whole"), [("pad", True), ("drop", False)])
def test_the_remainder_is_the_plans(remainder: Any, whole: bool) -> None:
    plan = dataclasses.replace(FAKE_PLAN, remainder=remainder)
    with FakeService.of_plan(SAMPLES, plan) as service:
        ranks = read(service, ranks=2, micro_steps=5)
    numbers = [n for rank in ranks for batch in rank for n in batch.meta["pack_numbers"]]
    assert (keys_of(ranks) == ALL) == whole
    assert (-1 in numbers) == whole
    assert len(ranks[0]) == len(ranks[1])


def test_states_of_other_samples_and_grids_that_cannot_be_are_refused() -> None:
    with FakeService.of_plan(SAMPLES) as service, stream_of(service) as stream:
        next(iter(stream))
        state = stream.state_dict()
    others = {**SAMPLES, "texts": SAMPLES["texts"][1:]}
    with FakeService.of_plan(others) as service, stream_of(service) as stream:
        stream.load_state_dict(state)
        with pytest.raises(ResumeRefused, match="start the service with the config"):
            next(iter(stream))
    with (
        FakeService.of_plan(SAMPLES, SEGREGATED) as service,
        stream_of(service, micro_steps=4) as stream,
        pytest.raises(ConfigError, match="it must be a multiple of 3"),
    ):
        next(iter(stream))
    with pytest.raises(ValueError, match="1 times <image> in the text, 0 images"):
        FakeSample(prompt="<image>")


# ---- packs of any plan --------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> PlanSettings:
    tiles = draw(st.booleans())
    align = draw(st.sampled_from([1, 4, 16]))
    return dataclasses.replace(
        TILES if tiles else FAKE_PLAN,
        seed=draw(st.integers(0, 3)),
        pack_length=draw(st.sampled_from([64, 128, 256])),
        align=align,
        packer=draw(st.sampled_from(get_args(Packer))),
        oversize=draw(st.sampled_from(get_args(Oversize))),
        lanes=draw(st.integers(1, 2)),
        window=draw(st.integers(5, 40)),
    )


@settings(deadline=None, max_examples=25)
@given(plan=plans(), seed=st.integers(0, 3))
def test_every_pack_of_any_plan_fits_together(plan: PlanSettings, seed: int) -> None:
    """Images have their tokens in the documents that own them; texts are whole over their
    pieces."""
    samples = {"talks": made_up_samples(30, seed=seed)}
    source = PlannedPacks(samples, plan, seed=seed)
    vision = VisionInfo.of(source.info)
    grid, cursor = Grid(dp_size=2, micro_steps=2), source.start()
    texts: dict[str, int] = {}
    while (step := source.step(cursor, grid)) is not None:
        cursor = step.next_cursor
        for i, pack_id in enumerate(step.pack_ids):
            pack = source.pack(pack_id)
            length = step.settings.pack_length
            check_pack(
                pack.arrays,
                pack.meta | {"pack_id": pack_id},
                pack_length=length,
                vision=vision,
                align=plan.align,
            )
            assert pack.num_images == step.num_images[i]
            _images_are_where_they_belong(pack.arrays, vision)
            docs = pack.meta["num_docs"]
            lengths = pack.arrays["doc_lengths"][:docs].tolist()
            for key, tokens in zip(pack.meta["sample_keys"], lengths, strict=True):
                name = key.split("[")[0]
                texts[name] = texts.get(name, 0) + tokens
    for row, sample in enumerate(samples["talks"]):
        if not sample.images:
            ids, _ = sample.tokens([])
            assert texts[f"talks/memory@{row}"] == len(ids)


def _images_are_where_they_belong(arrays: dict[str, Any], vision: VisionInfo) -> None:
    bounds, lengths = arrays["cu_seqlens"].tolist(), arrays["doc_lengths"].tolist()
    owed = np.zeros(len(lengths), np.int64)
    np.add.at(owed, arrays["image_doc_ids"], vision.image_tokens(arrays["image_grid_thw"]))
    for number, (first, length) in enumerate(zip(bounds, lengths, strict=False)):
        ids = arrays["input_ids"][first : first + length]
        assert (ids == IMAGE).sum() == owed[number]
        assert arrays["labels"][first] == -100
