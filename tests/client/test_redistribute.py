"""RebalancedLoader on real gloo ranks and alone; what it sends, joins and makes up."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from client.rebalancing_ranks import MICRO_STEPS, STEPS, Source, micro_batch
from support.ranks import run_ranks

from dataservice.core.balance import assign
from dataservice.errors import ConfigError, DataServiceError, ResumeRefused, WireError
from trainer_client import MicroBatch, PackStream, ParallelLayout, VisionInfo
from trainer_client.batch import build_micro_batch
from trainer_client.redistribute import RebalancedLoader, flat
from trainer_client.redistribute.joining import join, padding_like
from trainer_client.redistribute.placement import Column, PlacementSettings, place
from trainer_client.redistribute.shares import Fact, SourceReader, padding_of, vision_cost
from trainer_client.testing import (
    FAKE_INFO,
    FakeService,
    assert_same_batches,
    synthetic_packs,
)

RANKS = 3
STEP, MICRO_STEP, LAST, PACK_IDS, DIGEST, LOSS_TOKENS, IMAGES, WITHOUT = range(8)
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By rank: what each check saw."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("client.rebalancing_ranks:all_checks", RANKS, folder)


def by_step(seen: Seen, check: str) -> dict[int, list[list[Any]]]:
    """Micro-batches of all ranks."""
    steps: dict[int, list[list[Any]]] = {}
    for rank in seen:
        for batch in rank[check]:
            steps.setdefault(batch[STEP], []).append(batch)
    return steps


def names_of(batches: list[list[Any]]) -> list[str]:
    return sorted(name for batch in batches for name in batch[PACK_IDS])


# ---- placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["overlapped", "synchronous"])
def test_every_pack_is_computed_once_in_its_global_batch(seen: Seen, check: str) -> None:
    sources = {name: value for rank in seen for name, value in rank["sources"].items()}
    for step, batches in by_step(seen, check).items():
        numbers = range(step * MICRO_STEPS, (step + 1) * MICRO_STEPS)
        assert names_of(batches) == sorted(f"{r}.{i}" for r in range(RANKS) for i in numbers)
        for batch in batches:
            assert batch[DIGEST] == sources[batch[PACK_IDS][0]][0]
            assert batch[LAST] == (batch[MICRO_STEP] == MICRO_STEPS - 1)
            assert batch[LOSS_TOKENS] == sum(sources[name][1] for name in names_of(batches))
            assert batch[IMAGES] == sources[batch[PACK_IDS][0]][2]
            row = [b for b in batches if b[MICRO_STEP] == batch[MICRO_STEP]]
            assert batch[WITHOUT] == sum(b[IMAGES] == 0 for b in row)
    assert len(by_step(seen, check)) == STEPS


def test_a_thread_changes_nothing(seen: Seen) -> None:
    for rank in seen:
        assert rank["overlapped"] == rank["synchronous"]


def test_packs_go_where_the_planner_would_place_them(seen: Seen) -> None:
    packs = [list(Source(rank, STEPS * MICRO_STEPS)) for rank in range(RANKS)]
    for step, batches in by_step(seen, "overlapped").items():
        first, stop = step * MICRO_STEPS, (step + 1) * MICRO_STEPS
        cost = [vision_cost(pack) for own in packs for pack in own[first:stop]]
        names = [f"{rank}.{i}" for rank in range(RANKS) for i in range(first, stop)]
        home = np.repeat(np.arange(RANKS), MICRO_STEPS)
        placed = assign(cost, home, dp_size=RANKS, micro_steps=MICRO_STEPS)
        expected = dict(
            zip(names, zip(placed.micro_step, placed.dp_rank, strict=True), strict=True)
        )
        for batch in batches:
            assert expected[batch[PACK_IDS][0]] == (batch[MICRO_STEP], batch[-1])


def test_several_packs_a_cell_are_joined(seen: Seen) -> None:
    for step, batches in by_step(seen, "two_packs_a_cell").items():
        numbers = range(step * MICRO_STEPS * 2, (step + 1) * MICRO_STEPS * 2)
        assert names_of(batches) == sorted(f"{r}.{i}" for r in range(RANKS) for i in numbers)
        assert all(len(batch[PACK_IDS]) == 2 for batch in batches)


def test_packs_in_place_are_not_sent(seen: Seen) -> None:
    for rank, facts in enumerate(checks["in_place"] for checks in seen):
        assert 0 < facts["kept"] == STEPS * MICRO_STEPS - facts["moved"]
        assert (facts["bytes"] > 0) == (facts["moved"] > 0)
        assert facts["order"] == [[f"{rank}.{i}"] for i in range(STEPS * MICRO_STEPS)]
    assert sum(checks["in_place"]["moved"] for checks in seen) > 0


def test_ranks_of_a_group_of_their_own(seen: Seen) -> None:
    assert seen[1]["subgroup"] == []
    for step, batches in by_step(seen, "subgroup").items():
        numbers = range(step * MICRO_STEPS, (step + 1) * MICRO_STEPS)
        assert names_of(batches) == sorted(f"{r}.{i}" for r in (0, 2) for i in numbers)


# ---- ends ---------------------------------------------------------------------------------------


def test_uneven_sources_are_filled_up_with_padding(seen: Seen) -> None:
    batches = [rank["uneven"]["pad"] for rank in seen]
    assert [len(rank) for rank in batches] == [(STEPS + 1) * MICRO_STEPS] * RANKS
    names = sorted(name for rank in batches for batch in rank for name in batch[PACK_IDS])
    real = [name for name in names if not name.startswith("pad.")]
    counts = [(STEPS - 1) * MICRO_STEPS, STEPS * MICRO_STEPS, STEPS * MICRO_STEPS + 1]
    assert real == sorted(f"{r}.{i}" for r, count in enumerate(counts) for i in range(count))
    assert len(names) - len(real) == (STEPS + 1) * MICRO_STEPS * RANKS - sum(counts)


def test_a_global_batch_that_is_not_whole_can_be_dropped(seen: Seen) -> None:
    for rank in seen:
        assert len(rank["uneven"]["drop"]) == (STEPS - 1) * MICRO_STEPS
    dropped = [rank["uneven"]["drop dropped"] for rank in seen]
    assert dropped == [0, MICRO_STEPS, MICRO_STEPS]
    assert [rank["uneven"]["pad dropped"] for rank in seen] == [0, 0, 0]


def test_no_packs_at_all_are_no_batches(seen: Seen) -> None:
    assert [rank["nothing_at_all"] for rank in seen] == [[], [], []]


def test_a_resumed_loader_goes_on_as_if_never_stopped(seen: Seen) -> None:
    for rank in seen:
        assert all(whole == rank["overlapped"] for whole in rank["resumed"])


# ---- faults -------------------------------------------------------------------------------------


def test_an_error_of_one_source_is_everybodys(seen: Seen) -> None:
    for rank, checks in enumerate(seen):
        for yielded, (kind, text), again in checks["failing_source"].values():
            assert yielded == MICRO_STEPS
            assert again == [kind, text]
            if rank == 1:
                assert kind == "OSError"
            else:
                assert kind == "DataServiceError" and "the disk is gone" in text
                assert text.startswith("rank 1 could not read packs of step 1")


def test_a_wrong_cost_is_refused_on_all_ranks(seen: Seen) -> None:
    assert [rank["failing_cost"][0] for rank in seen] == ["DataServiceError"] * 2 + ["ConfigError"]
    assert all("cost is -1" in rank["failing_cost"][1] for rank in seen)


def test_other_settings_and_states_are_refused_on_all_ranks(seen: Seen) -> None:
    for rank in seen:
        kind, text = rank["other_settings"]
        assert kind == "ConfigError" and "of rank 2 has other settings" in text
        kind, text = rank["other_states"]
        assert kind == "ResumeRefused" and "rank 1 at step 0 micro-step 2" in text


def test_a_rank_that_hangs_ends_the_wait_of_all(seen: Seen) -> None:
    for rank, checks in enumerate(seen):
        took_s, (kind, text) = checks["hanging_source"]
        assert kind == "DeadlineExceeded" and f"rank {rank}" in text.replace("loader-", "rank ")
        assert took_s < 40.0
    assert "reading packs from its source" in seen[1]["hanging_source"][1][1]


def test_a_rank_that_closes_early_is_an_error_on_the_others(seen: Seen) -> None:
    for rank in seen[1:]:
        kind, text = rank["closed_by_one"]
        assert kind == "DataServiceError" and "lost another rank" in text


def test_ranks_that_stop_together_close_at_once(seen: Seen) -> None:
    for rank in seen:
        took_s, threads = rank["closed_by_all"]
        assert took_s < 30.0 and threads == []


def test_the_trainers_collectives_go_on_beside_it(seen: Seen) -> None:
    patches = sum(
        len(pack["pixel_values"])
        for rank in range(RANKS)
        for pack in Source(rank, STEPS * MICRO_STEPS)
    )
    assert [rank["beside_the_trainer"] for rank in seen] == [patches] * RANKS


def test_nothing_is_left_behind(seen: Seen) -> None:
    for rank in seen:
        early, late = rank["left_behind"]["running"]
        assert early[:2] == late[:2]
        # templates, two shares, what is ready, in hand and padding
        assert max(early[2], late[2]) <= 10 + 2 * MICRO_STEPS + 2 + 1 + 1
        after_one, after_more = rank["left_behind"]["closed"]
        assert after_one == after_more


# ---- a rank alone -------------------------------------------------------------------------------


def alone(source: Any, **settings: Any) -> RebalancedLoader:
    return RebalancedLoader(source, **{"micro_steps": MICRO_STEPS, "timeout_s": 30.0, **settings})


def test_one_rank_needs_no_process_group() -> None:
    with alone(Source(0, 2 * MICRO_STEPS)) as loader:
        batches = list(loader)
    for step in range(2):
        names = [b.meta["pack_ids"][0] for b in batches if b.step == step]
        assert sorted(names) == [f"0.{i}" for i in range(step * MICRO_STEPS, 3 * (step + 1))]
        costs = [vision_cost(b) for b in batches if b.step == step]
        assert costs == sorted(costs)


def test_over_a_stream_steps_and_loss_tokens_are_the_streams() -> None:
    packs = synthetic_packs(2 * MICRO_STEPS * 2, seed=3)

    def stream(endpoint: str) -> PackStream:
        layout = ParallelLayout.data_parallel(0, 1)
        return PackStream(endpoint, job="j", layout=layout, micro_steps=MICRO_STEPS * 2)

    with FakeService(packs) as service:
        with stream(service.endpoint) as one, alone(one, packs_per_cell=2) as loader:
            batches = list(loader)
            state = loader.state_dict()
        with stream(service.endpoint) as one, alone(one, packs_per_cell=2) as loader:
            loader.load_state_dict({})
            begun = [next(loader), next(loader)]
            middle = loader.state_dict()
        with stream(service.endpoint) as one, alone(one, packs_per_cell=2) as loader:
            loader.load_state_dict(middle)
            assert_same_batches(begun + list(loader), _without_waits(batches))
    assert state["step"] == 2 and state["micro_step"] == 0
    for batch in batches:
        half = packs[batch.step * 6 : (batch.step + 1) * 6]
        assert batch.meta["loss_tokens"] == sum(pack.loss_tokens for pack in half)
        assert batch.meta["plan_digest"] == "fake"


def _without_waits(batches: list[MicroBatch]) -> list[MicroBatch]:
    for batch in batches:
        batch.meta["waited_s"] = 0.0
    return batches


def test_plain_dicts_pass_with_a_cost_of_their_own() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for number in range(4):
            yield {"x": torch.full((2,), number), "name": f"row {number}"}

    with alone(rows(), micro_steps=2, cost=lambda row: int(row["x"][0]), remainder="drop") as two:
        assert [(row["name"], row["x"].tolist()) for row in two] == [
            (f"row {i}", [i, i]) for i in range(4)
        ]
    for settings, words in (
        ({"remainder": "drop"}, "give cost="),
        ({"cost": lambda _: 1}, 'use remainder="drop"'),
        ({"cost": lambda _: 1, "remainder": "drop", "packs_per_cell": 2}, "use packs_per_cell=1"),
    ):
        with alone(rows(), micro_steps=1, **settings) as loader:
            with pytest.raises(ConfigError, match=words):
                next(loader)
    with alone(iter([{"x": object()}]), cost=lambda _: 1, remainder="drop") as loader:
        with pytest.raises(ConfigError, match="leave the rest out"):
            next(loader)
    with alone(iter([3]), cost=lambda _: 1, remainder="drop") as loader:
        with pytest.raises(ConfigError, match="yields int"):
            next(loader)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"micro_steps": 0},
        {"packs_per_cell": 0},
        {"ahead": 0},
        {"ranks_per_node": 2},
        {"sync_domain": 2},
        {"remainder": "keep"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            alone([], **wrong)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            alone([], device="cuda")


def test_states_that_cannot_be_continued_are_refused() -> None:
    with alone(Source(0, 9), overlap=False) as loader:
        assert loader.state_dict() == {}
        next(loader)
        state = loader.state_dict()
        with pytest.raises(DataServiceError, match="before the first batch"):
            loader.load_state_dict(state)
    with alone(Source(0, 9), packs_per_cell=2) as loader:
        with pytest.raises(ResumeRefused, match="taken between steps"):
            loader.load_state_dict(state)
        with pytest.raises(ResumeRefused, match="version 9"):
            loader.load_state_dict(state | {"version": 9})
    with alone(iter(Source(0, 9))) as loader, pytest.raises(DataServiceError, match="state_dict"):
        loader.state_dict()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_loader_says_so(overlap: bool, begun: bool) -> None:
    loader = alone(Source(0, 9), overlap=overlap)
    if begun:
        next(loader)
    loader.close()
    loader.close()
    with pytest.raises(DataServiceError, match="is closed"):
        next(loader)


def test_a_loader_that_nobody_closes_leaves_no_thread() -> None:
    loader = alone(Source(0, 30))
    next(loader)
    names = [thread.name for thread in threading.enumerate()]
    assert "rebalanced-loader-0" in names
    del loader
    gc.collect()
    assert "rebalanced-loader-0" not in [thread.name for thread in threading.enumerate()]


def test_a_source_that_hangs_is_closed_with_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.redistribute.ahead.PATIENCE_S", 0.1)
    source = Source(0, 30, hang_at=MICRO_STEPS)
    with alone(source) as loader:
        next(loader)
    assert source.closed.is_set()


def test_a_generator_that_hangs_does_not_hide_what_close_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_client.redistribute.ahead.PATIENCE_S", 0.1)
    monkeypatch.setattr("trainer_client.redistribute.ahead.JOIN_S", 0.1)
    go_on = threading.Event()

    def packs() -> Iterator[MicroBatch]:
        yield from Source(0, MICRO_STEPS)
        go_on.wait(60)

    loader = alone(packs())
    next(loader)
    with pytest.raises(DataServiceError, match="did not end within 0 s; it is reading packs"):
        loader.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "rebalanced-loader-0":
            thread.join(60)


@pytest.mark.parametrize("cost", [2**61, -1, float("nan"), True])
def test_a_cost_that_cannot_be_added_up_is_refused(cost: Any) -> None:
    with alone(Source(0, 9), cost=lambda _: cost) as loader:
        with pytest.raises(ConfigError, match="cost is"):
            next(loader)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_batches_on_a_device_are_those_of_the_cpu() -> None:
    with alone(Source(0, 9)) as here, alone(Source(0, 9), device="cuda") as there:
        for a, b in zip(here, there, strict=True):
            for name, value in a.items():
                if isinstance(value, torch.Tensor):
                    assert b[name].is_cuda and torch.equal(b[name].cpu(), value)


# ---- pieces -------------------------------------------------------------------------------------


def test_a_pack_goes_through_bytes_unchanged() -> None:
    for number, pack in enumerate(synthetic_packs(6, seed=1)):
        batch = micro_batch(pack, f"p{number}")
        batch["scale"] = torch.tensor(2.5, dtype=torch.bfloat16)
        payload = torch.full((flat.payload_bytes(batch),), 255, dtype=torch.uint8)
        flat.write(batch, payload)
        back = flat.read(flat.describe(batch), payload)
        assert back.keys() == batch.keys() and back.meta == batch.meta
        assert back.vision == batch.vision
        for name, value in batch.items():
            same = torch.equal(back[name], value) if torch.is_tensor(value) else value == back[name]
            assert same and (not torch.is_tensor(value) or back[name].dtype == value.dtype)


def test_bytes_that_do_not_fit_are_refused() -> None:
    batch = micro_batch(synthetic_packs(1)[0], "p")
    header, payload = flat.describe(batch), torch.zeros(flat.payload_bytes(batch) + 64).byte()
    with pytest.raises(WireError, match="take"):
        flat.read(header, payload)
    with pytest.raises(WireError, match="goes beyond"):
        flat.read(header, payload[:64])
    with pytest.raises(WireError, match="which torch lacks"):
        flat.read(header.replace(b"int64", b"int63"), payload[:-64])


def test_joined_packs_are_as_if_built_together() -> None:
    packs = synthetic_packs(3, seed=2)
    info = VisionInfo.of(FAKE_INFO)
    together = build_micro_batch(
        [(pack.arrays, pack.meta) for pack in packs],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=info,
    )
    joined = join([micro_batch(pack, f"p{i}") for i, pack in enumerate(packs)])
    assert joined.keys() == together.keys()
    for name, value in together.items():
        if torch.is_tensor(value):
            assert torch.equal(joined[name], value) and joined[name].dtype == value.dtype, name
        else:
            assert joined[name] == value
    assert joined.meta["pack_ids"] == ["p0", "p1", "p2"]
    assert joined.meta["sample_keys"] == together.meta["sample_keys"]
    assert vision_cost(joined) == vision_cost(together)


def test_padding_has_nothing_to_learn_from() -> None:
    pack = next(pack for pack in synthetic_packs(4) if pack.num_images)
    padding = padding_like(micro_batch(pack, "p"))
    assert padding.keys() == micro_batch(pack, "p").keys()
    assert (padding["labels"] == -100).all() and (padding["doc_ids"] == -1).all()
    assert padding["cu_seqlens"].tolist() == [0, 64] and padding["max_seqlen"] == 64
    assert len(padding["pixel_values"]) == len(padding["image_grid_thw"]) == 0
    assert padding["position_ids"].tolist() == list(range(64))
    assert vision_cost(padding) == 0 and padding.meta["pack_ids"] == ["pad.64"]
    joined = join([micro_batch(pack, "p"), padding])
    assert joined["cu_seqlens"][-1] == 128 and joined["doc_ids"][-1] == -1


def test_padding_stays_as_told_when_longer_packs_are_read_ahead() -> None:
    long = replace(FAKE_INFO, pack_length=96)
    packs = [*synthetic_packs(2), *synthetic_packs(2, info=long)]
    source = [micro_batch(pack, f"p{i}") for i, pack in enumerate(packs)]
    reader = SourceReader(source, cost=vision_cost, packs_per_rank=2, pads=True)
    share, following = reader.begin(), reader.begin()
    reader.read(share, 2)
    facts = dict.fromkeys((Fact.STEP, Fact.MICRO_STEP), 0)
    numbers = reader.numbers(share, facts)[len(Fact) :].reshape(-1, len(Column))
    reader.read(following, 2)
    padding = padding_of(share)
    assert len(padding["input_ids"]) == FAKE_INFO.pack_length
    assert numbers[0, Column.PAYLOAD_BYTES] == flat.payload_bytes(padding)
    assert numbers[0, Column.HEADER_BYTES] == len(flat.describe(padding))


def test_what_is_sent_is_what_is_received() -> None:
    rng = np.random.default_rng(0)
    settings = PlacementSettings(dp_size=4, micro_steps=3, packs_per_cell=2)
    columns = rng.integers(1, 1000, (4, 6, len(Column)))
    counts = np.array([6, 2, 6, 0])
    placement = place(counts, columns, np.zeros((4, len(Column)), np.int64), settings)
    seen: list[int] = []
    for step, sender, receiver in itertools.product(range(3), range(4), range(4)):
        sent = placement.sent(step, sender)[receiver]
        assert sent == placement.received(step, receiver)[sender]
        assert not sent or placement.moves(step)
        seen += sent
    assert len(seen) == len(set(seen)) > 0
    missing = [p for p in range(24) if p % 6 >= counts[p // 6]]
    assert (placement.origin[missing] == 0).all()
    assert (placement.columns[missing] == 0).all()
    assert sorted(placement.cells.ravel().tolist()) == list(range(24))
