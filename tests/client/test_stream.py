"""PackStream on an undisturbed service: order, state, bounds, the end."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset

from dataservice.errors import ConfigError, DataServiceError, ResumeRefused
from trainer_client import MicroBatch, PackStream, ParallelLayout, normalize
from trainer_client.depth import LEAST_BYTES, MEMORY_SHARE
from trainer_client.testing import (
    FAKE_INFO,
    FakeService,
    assert_resume_identical,
    assert_same_batches,
    balanced,
    read_all,
    synthetic_packs,
)

PACKS = synthetic_packs(22, seed=1)


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(PACKS) as service:
        yield service


def stream_of(
    service: FakeService, *, dp_rank: int = 0, dp_size: int = 1, **changes: Any
) -> PackStream:
    settings = {
        "job": "test",
        "layout": ParallelLayout.data_parallel(dp_rank, dp_size),
        "micro_steps": 2,
        "digests": True,
        "timeout_s": 30,
    }
    return PackStream(service.endpoint, **(settings | changes))


def read_ranks(
    service: FakeService, *, state: Any = None, **changes: Any
) -> list[list[MicroBatch]]:
    """All ranks of a run to the end."""
    dp_size = changes["dp_size"]
    run_id = f"run-{dp_size}-{changes.get('micro_steps')}-{time.monotonic_ns()}"
    streams = [
        stream_of(service, run_id=run_id, dp_rank=rank, **changes) for rank in range(dp_size)
    ]
    try:
        for stream in streams:
            stream.load_state_dict(state or {})
        return read_all(streams)
    finally:
        for stream in streams:
            stream.close()


def pack_numbers(ranks: list[list[MicroBatch]]) -> list[int]:
    """Of all ranks, in the plan's order within a step, padding left out."""
    by_step: dict[int, list[int]] = {}
    for batch in (batch for batches in ranks for batch in batches):
        by_step.setdefault(batch.step, []).extend(batch.meta["pack_numbers"])
    return [number for step in sorted(by_step) for number in sorted(by_step[step]) if number >= 0]


# ---- order and content --------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [None, balanced])
@pytest.mark.parametrize(("dp_size", "micro_steps", "k"), [(1, 1, 1), (2, 3, 1), (3, 1, 2)])
def test_every_pack_reaches_one_rank_once(
    placement: Any, dp_size: int, micro_steps: int, k: int
) -> None:
    options = {} if placement is None else {"placement": placement}
    with FakeService(PACKS, **options) as service:
        ranks = read_ranks(service, dp_size=dp_size, micro_steps=micro_steps, packs_per_cell=k)
    assert pack_numbers(ranks) == list(range(len(PACKS)))
    steps = -(-len(PACKS) // (dp_size * micro_steps * k))
    addresses = [(step, m) for step in range(steps) for m in range(micro_steps)]
    for rank, batches in enumerate(ranks):
        assert [(batch.step, batch.micro_step) for batch in batches] == addresses
        assert all(batch.meta["dp_rank"] == rank for batch in batches)
        assert all(len(batch.meta["pack_ids"]) == k for batch in batches)
        assert all(b.is_last_micro_step == (b.micro_step == micro_steps - 1) for b in batches)


def test_tensors_and_meta_are_those_of_the_pack(service: FakeService) -> None:
    ranks = read_ranks(service, dp_size=2, micro_steps=2)
    for batch in (batch for batches in ranks for batch in batches):
        (number,) = batch.meta["pack_numbers"]
        if number < 0:
            continue
        pack = PACKS[number]
        assert batch["input_ids"].tolist() == pack.arrays["input_ids"].tolist()
        assert torch.equal(batch["pixel_values"], torch.from_numpy(pack.arrays["pixel_values"]))
        assert batch.meta["num_images"] == pack.num_images
        assert batch.meta["sample_keys"] == [pack.meta["sample_keys"]]
        step = PACKS[batch.step * 4 : batch.step * 4 + 4]
        assert batch.meta["loss_tokens"] == sum(pack.loss_tokens for pack in step)
        cells = step[batch.micro_step * 2 : batch.micro_step * 2 + 2]
        without = 2 - len(cells) + sum(pack.num_images == 0 for pack in cells)
        assert batch.meta["ranks_without_images"] == without
    assert json.loads(json.dumps(ranks[0][0].meta)) == ranks[0][0].meta


def test_settings_of_the_next_step_come_with_each_batch(service: FakeService) -> None:
    (batches,) = read_ranks(service, dp_size=1, micro_steps=3, packs_per_cell=2)
    own = {"pack_length": 64, "max_pixels": batches[0].meta["max_pixels"]}
    sides = [
        side for pack in PACKS for side in pack.arrays["image_grid_thw"].max(axis=1, initial=0)
    ]
    assert max(sides) * 2 <= own["max_pixels"] <= max(sides) ** 2 * 4
    for batch in batches:
        assert len(batch["input_ids"]) == batch.meta["num_packs"] * batch.meta["pack_length"]
        assert own | {"num_packs": 2} == {name: batch.meta[name] for name in (*own, "num_packs")}
        last = batch.step == batches[-1].step
        assert batch.meta["next_step"] == (None if last else own | {"num_packs": [2, 2, 2]})


def test_settings_of_tiles_are_in_tiles() -> None:
    info = replace(FAKE_INFO, pack_length=256, tile=4, thumbnail=True, tile_tokens=3)
    packs = synthetic_packs(3, image_share=1.0, info=info)
    with FakeService(packs, info=info) as service, stream_of(service) as stream:
        meta = next(stream).meta
    most = max(pack.arrays["image_grid_thw"].prod(axis=1).max() for pack in packs)
    assert meta["max_tiles"] == meta["next_step"]["max_tiles"] == most
    assert "max_pixels" not in meta


def test_peers_of_a_rank_get_the_same(service: FakeService) -> None:
    streams = [stream_of(service, run_id="peers") for _ in range(3)]
    first, *others = read_all(streams)
    for stream in streams:
        stream.close()
    for other in others:
        assert_same_batches(other, first)


def test_a_second_loop_goes_on(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    with stream_of(service) as stream:
        parts = []
        for batch in stream:
            parts.append(batch)
            if len(parts) == 3:
                break
        parts += list(stream)
        assert list(stream) == []
    assert_same_batches(parts, whole)


def test_inside_a_data_loader(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    with stream_of(service) as stream:
        batches = list(DataLoader(stream, batch_size=None, num_workers=0))
    assert_same_batches(batches, whole)


def test_get_by_address_leaves_the_iterator_alone(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    with stream_of(service) as stream:
        assert_same_batches([stream.get(3, 1)], [whole[7]])
        assert stream.state_dict() == {}
        assert_same_batches([next(stream)], whole[:1])
        state = stream.state_dict()
        assert_same_batches([stream.get(0, 0), stream.get(5, 0)], [whole[0], whole[10]])
        assert stream.state_dict() == state
        assert_same_batches(list(stream), whole[1:])
        with pytest.raises(ValueError, match="micro_step is 2"):
            stream.get(0, 2)
        with pytest.raises(ValueError, match="step is 11"):
            stream.get(11, 0)


# ---- state --------------------------------------------------------------------------------------


def test_resumed_at_every_cut_it_goes_on_as_one_run(service: FakeService) -> None:
    with stream_of(service) as stream:
        whole = list(stream)
    assert len(whole) == 22
    for cut in range(23):
        assert_resume_identical(lambda: stream_of(service), cut, whole)


def test_state_tells_what_was_yielded(service: FakeService) -> None:
    with stream_of(service, micro_steps=3, prefetch_packs=6) as stream:
        assert stream.state_dict() == {}
        stream.open()
        wait_until(lambda: stream.stats().received_packs == 6)
        assert stream.state_dict() == {}
        for step in range(3):
            for micro_step in range(3):
                next(stream)
                state = stream.state_dict()
                at = state["cursor"]["step"], state["micro_step"]
                assert at == ((step + 1, 0) if micro_step == 2 else (step, micro_step + 1))
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 4096


def test_after_the_end_a_resumed_stream_ends_at_once(service: FakeService) -> None:
    with stream_of(service) as stream:
        list(stream)
        state = stream.state_dict()
    with stream_of(service) as stream:
        stream.load_state_dict(state)
        assert list(stream) == []
        assert stream.state_dict() == state


def test_ranks_agree_on_the_state(service: FakeService) -> None:
    streams = [stream_of(service, run_id="agree", dp_rank=rank, dp_size=2) for rank in range(2)]
    read_all(streams)
    assert streams[0].state_dict() == streams[1].state_dict()
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(("dp_size", "micro_steps"), [(2, 3), (3, 1), (1, 5)])
def test_another_grid_goes_on_in_the_same_order(
    service: FakeService, dp_size: int, micro_steps: int
) -> None:
    with stream_of(service, micro_steps=4) as stream:
        before = [next(stream) for _ in range(8)]
        state = stream.state_dict()
    ranks = read_ranks(service, state=state, dp_size=dp_size, micro_steps=micro_steps)
    assert pack_numbers([before]) + pack_numbers(ranks) == list(range(len(PACKS)))


def test_inside_a_step_only_the_same_grid_goes_on(service: FakeService) -> None:
    with stream_of(service, micro_steps=4) as stream:
        for _ in range(5):
            next(stream)
        state = stream.state_dict()
    with stream_of(service, micro_steps=2) as stream:
        stream.load_state_dict(state)
        with pytest.raises(ResumeRefused, match="inside a step"):
            next(stream)


def test_a_state_of_another_plan_is_refused(service: FakeService) -> None:
    with stream_of(service) as stream:
        next(stream)
        state = stream.state_dict() | {"plan_digest": "other"}
    with stream_of(service) as stream:
        stream.load_state_dict(state)
        with pytest.raises(ResumeRefused, match=r"plan other.*plan fake"):
            stream.open()
        stream.load_state_dict({})
        assert next(stream).step == 0


def test_it_is_what_checkpointing_libraries_look_for(service: FakeService) -> None:
    with stream_of(service) as stream:
        assert isinstance(stream, Stateful)
        assert isinstance(stream, IterableDataset)


def test_states_that_cannot_be_loaded(service: FakeService) -> None:
    with stream_of(service) as stream:
        next(stream)
        state = stream.state_dict()
        with pytest.raises(DataServiceError, match="open already"):
            stream.load_state_dict(state)
    stream = stream_of(service)
    with pytest.raises(ResumeRefused, match="version 2"):
        stream.load_state_dict(state | {"version": 2})
    damaged: list[tuple[Any, str]] = [
        (state | {"cursor": state["cursor"] | {"step": "three"}}, r"cursor\.step"),
        (state | {"cursor": None}, "cursor"),
        (state | {"more": 1}, "more"),
        (state | {"micro_step": float("nan")}, "micro_step"),
        (state | {"micro_step": torch.tensor(1)}, "micro_step"),
        (state | {"micro_step": 1 << 70}, "64 bits"),
        ({name: state[name] for name in state if name != "job"}, "job"),
        (None, "NoneType"),
        ([], "list"),
    ]
    for one, text in damaged:
        with pytest.raises(ResumeRefused, match=text):
            stream.load_state_dict(one)
    stream.load_state_dict(state)
    assert stream.state_dict() == state


# ---- bounds -------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def reaches_and_keeps(read: Callable[[], int], value: int) -> bool:
    wait_until(lambda: read() >= value)
    time.sleep(0.1)
    return read() == value


def test_prefetch_is_bounded_in_packs(service: FakeService) -> None:
    with stream_of(service, prefetch_packs=5) as stream:
        next(stream)
        assert reaches_and_keeps(lambda: len(service.requests), 1 + 5)
        assert stream.stats().held_packs == 5
        for taken in range(2, 8):
            next(stream)
            assert reaches_and_keeps(lambda: len(service.requests), taken + 5)
        assert len(list(stream)) == 15
        assert stream.stats().peak_held_packs == 5
        assert stream.stats().held_packs == stream.stats().held_bytes == 0


def test_prefetch_is_bounded_in_bytes(service: FakeService) -> None:
    budget = 3 * max(pack.size_bytes for pack in PACKS)
    held = list(itertools.accumulate(pack.size_bytes for pack in PACKS))
    fitting = sum(size <= budget for size in held)
    assert 3 <= fitting < len(PACKS)
    with stream_of(service, prefetch_packs=100, prefetch_bytes=budget) as stream:
        stream.open()
        assert reaches_and_keeps(lambda: len(service.requests), fitting)
        wait_until(lambda: stream.stats().received_packs == fitting)
        assert stream.stats().held_bytes == held[fitting - 1]
        assert len(list(stream)) == 22
        assert stream.stats().peak_held_bytes <= budget


@pytest.mark.parametrize("k", [1, 3])
def test_a_micro_batch_larger_than_the_bounds_still_comes(service: FakeService, k: int) -> None:
    with stream_of(service, packs_per_cell=k, prefetch_packs=1, prefetch_bytes=1) as stream:
        stream.open()
        assert reaches_and_keeps(lambda: len(service.requests), k)
        assert pack_numbers([list(stream)]) == list(range(22))
        assert stream.stats().peak_held_packs == k


def test_progress_and_waiting_are_reported() -> None:
    with FakeService(PACKS, ahead_steps=2) as service, stream_of(service) as stream:
        service.frame_delay_s = 0.02
        batches = list(stream)
        waited_s = sum(batch.meta["waited_s"] for batch in batches)
        assert waited_s > 0
        for first, last in zip(batches[::2], batches[1::2], strict=True):
            assert first.meta["step_waited_s"] == first.meta["waited_s"]
            of_step = first.meta["waited_s"] + last.meta["waited_s"]
            assert last.meta["step_waited_s"] == pytest.approx(of_step)
        assert stream.stats().steps == 11
        assert stream.stats().step_waited_s == pytest.approx(of_step)
        assert stream.stats().waited_s == pytest.approx(waited_s)
        assert stream.stats().batches == 22
        stream.close()
        assert service.done[0] == (11, 0)
        assert service.waited_s[0] == pytest.approx(waited_s)
        assert service.closed == {0}


def test_a_slow_rank_holds_the_others_back_only_beyond_the_window() -> None:
    with FakeService(PACKS, ahead_steps=3) as service:
        settings = {"run_id": "slow", "dp_size": 2, "micro_steps": 1, "timeout_s": 1.0}
        fast = stream_of(service, dp_rank=0, **settings)
        slow = stream_of(service, dp_rank=1, **settings)
        with fast, slow:
            opener = threading.Thread(target=slow.open)
            opener.start()
            for step in range(3):
                assert next(fast).step == step
            opener.join()
            late = (
                "rank 0 waited 1 s for step 3 micro-step 0; "
                "step 3 is held back: rank 1 is at step 0"
            )
            with pytest.raises(TimeoutError, match=late):
                next(fast)
            assert next(slow).step == 0
            assert next(fast).step == 3


def test_without_prefetch_nothing_is_fetched_before_it_is_asked_for(service: FakeService) -> None:
    with stream_of(service, prefetch_packs=0, packs_per_cell=2) as stream:
        stream.open()
        for taken in range(4):
            assert reaches_and_keeps(lambda: len(service.requests), 2 * taken)
            next(stream)
        assert pack_numbers([list(stream)])[-1] == 21
        assert stream.stats().peak_held_packs == 2


def test_depth_grows_where_the_trainer_waits_for_what_did_not_fit(service: FakeService) -> None:
    with stream_of(service) as stream:
        stream.open()
        start = stream.stats().prefetch_packs
        assert reaches_and_keeps(lambda: stream.stats().held_packs, start)
        service.frame_delay_s = 0.2
        for batch in stream:
            if batch.meta["waited_s"] > 0.05:
                break
        assert stream.stats().prefetch_packs == 2 * start
    with stream_of(service, prefetch_packs=start) as fixed:
        list(fixed)
        assert fixed.stats().prefetch_packs == start


def test_depth_shrinks_where_memory_is_scarce(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer_client.prefetch.free_bytes", lambda: LEAST_BYTES * MEMORY_SHARE * 2
    )
    with stream_of(service) as stream:
        list(stream)
        assert 2 * LEAST_BYTES <= stream.stats().prefetch_bytes < 3 * LEAST_BYTES
    with stream_of(service, prefetch_bytes=1 << 30) as fixed:
        list(fixed)
        assert fixed.stats().prefetch_bytes == 1 << 30


# ---- pixels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_normalises(service: FakeService, dtype: torch.dtype) -> None:
    with stream_of(service) as stream:
        plain = list(stream)
    with stream_of(service, normalize=dtype, prefetch_packs=3) as stream:
        normalised = list(stream)
        packs = [pack.size_bytes for pack in PACKS]
        assert stream.stats().peak_held_bytes > sum(sorted(packs)[-3:])
        assert stream.stats().held_bytes == 0
    for raw, batch in zip(plain, normalised, strict=True):
        assert batch["pixel_values"].dtype == dtype
        assert torch.equal(batch["pixel_values"], normalize(raw, dtype))
        assert normalize(batch, dtype) is batch["pixel_values"]
        assert torch.equal(batch["image_grid_thw"], raw["image_grid_thw"])
    with pytest.raises(ConfigError, match=r"normalised to .* already, and torch\.float64"):
        normalize(normalised[0], torch.float64)


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"micro_steps": 0}, "micro_steps is 0"),
        ({"prefetch_packs": -1}, "prefetch_packs is -1, must be at least 0"),
        ({"prefetch_bytes": 0}, "prefetch_bytes is 0"),
        ({"device_bytes": 0}, "device_bytes is 0"),
        ({"normalize": torch.int8}, "normalize is torch.int8"),
        ({"metrics_file": "/no/such/folder/file.prom"}, "metrics_file is .*no folder"),
        ({"layout": ParallelLayout.data_parallel(0, 2)}, "run_id is not given"),
        ({"device": "cuda:99"}, "cuda"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], text: str) -> None:
    settings = {"job": "j", "layout": ParallelLayout(), "micro_steps": 1} | changes
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match=text):
        PackStream("127.0.0.1:1", **settings)


def test_the_run_id_comes_from_rank_0(tmp_path: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        streams = [
            PackStream("127.0.0.1:1", job="j", layout=ParallelLayout(), micro_steps=1)
            for _ in range(2)
        ]
        with pytest.raises(ConfigError, match="rank 0 in a job of 4, this process is rank 0 of 1"):
            PackStream(
                "127.0.0.1:1", job="j", layout=ParallelLayout.data_parallel(0, 4), micro_steps=1
            )
    finally:
        dist.destroy_process_group()
    run_ids = [stream._request.run_id for stream in streams]
    assert len(set(run_ids)) == 2
    assert all(len(run_id) == 32 for run_id in run_ids)
