"""trainer_client.buffers: memory comes back with the last view of it, never before."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from trainer_client import PackStream, ParallelLayout, buffers
from trainer_client.buffers import SMALL_BYTES, BufferPool
from trainer_client.testing import FakeService, assert_same_batches, synthetic_packs

MIB = 1 << 20


def address(array: Any) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[5:6],
        lambda array: array.view(np.int32).reshape(-1, 4)[::2],
        lambda array: np.ndarray((3,), "<i4", buffer=array, offset=64),
        lambda array: memoryview(array)[10:],
        lambda array: torch.from_numpy(array[100:]).view(-1, 4)[0],
        lambda array: {"deep": [array[1:][1:][1:]]},
    ],
    ids=["itself", "slice", "other dtype", "ndarray", "memoryview", "tensor", "nested"],
)
def test_any_view_keeps_the_memory(view: Any) -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    array = pool.take(4 * MIB)
    array[:] = 7
    first = address(array)
    kept = view(array)
    del array
    others = [pool.take(4 * MIB) for _ in range(3)]
    for other in others:
        assert address(other) != first
        other[:] = 1
    if isinstance(kept, np.ndarray | torch.Tensor):
        assert (
            kept.reshape(-1).view(np.uint8 if isinstance(kept, np.ndarray) else torch.uint8) == 7
        ).all()
    del kept
    assert address(pool.take(4 * MIB)) == first


def test_like_packs_make_no_more_buffers_than_were_held_at_once() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    held: list[Any] = []
    for number in range(50):
        held.append(pool.take((3 + number % 2) * MIB))
        assert held[-1].shape == ((3 + number % 2) * MIB,) and held[-1].flags.writeable
        del held[:-3]
    assert pool.made <= 5
    assert pool.held_bytes <= 4 * 6 * MIB


def test_a_larger_pack_takes_the_place_of_a_smaller_one() -> None:
    pool = BufferPool(max_bytes=256 * MIB)
    for size in (1, 4, 9, 20, 40):
        pool.take(size * MIB)
        assert size * MIB <= pool.held_bytes <= size * MIB * 9 // 8 + 2 * MIB
    for size in (1, 40, 20):
        pool.take(size * MIB)
    assert pool.made == 5


def test_the_bound_holds_and_what_is_beyond_is_memory_of_its_own() -> None:
    pool = BufferPool(max_bytes=10 * MIB)
    held = [pool.take(4 * MIB) for _ in range(4)]
    assert pool.made == 1 and pool.held_bytes <= 10 * MIB
    for number, array in enumerate(held):
        array[:] = number
    assert [int(array[-1]) for array in held] == [0, 1, 2, 3]
    assert len(pool.take(20 * MIB)) == 20 * MIB
    assert pool.held_bytes <= 10 * MIB
    assert len({address(array) for array in held}) == 4


def test_idle_buffers_make_room_for_a_larger_one() -> None:
    pool = BufferPool(max_bytes=20 * MIB)
    held = [pool.take(4 * MIB) for _ in range(3)]
    assert pool.made == 3
    held.clear()
    large = pool.take(16 * MIB)
    assert pool.made == 4 and pool.held_bytes <= 20 * MIB
    assert len(large) == 16 * MIB


def test_small_sizes_and_pools_of_nothing_lend_ordinary_memory() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    assert pool.take(0).shape == (0,)
    assert pool.take(SMALL_BYTES - 1).flags.owndata
    assert BufferPool(max_bytes=0).take(MIB).flags.owndata
    assert pool.made == 0 and pool.held_bytes == 0


def test_trim_gives_idle_memory_back_and_leaves_what_is_lent() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    kept, idle = pool.take(4 * MIB), pool.take(8 * MIB)
    kept[:] = 9
    del idle
    pool.trim()
    assert 4 * MIB <= pool.held_bytes <= 8 * MIB
    assert (kept == 9).all()


def test_a_pool_that_is_gone_leaves_its_loans() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    array = pool.take(4 * MIB)
    array[:] = 3
    del pool
    gc.collect()
    assert (array == 3).all()


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    failures: list[str] = []

    def work(mark: int) -> None:
        for number in range(200):
            array = pool.take(SMALL_BYTES + 1000 * (number % 7))
            array[:] = mark
            tensor = torch.from_numpy(array[::4096])
            del array
            if not (tensor == mark).all():
                failures.append(f"{mark} at {number}")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert pool.made <= 8


def test_a_child_process_sees_the_memory_as_it_was() -> None:
    pool = BufferPool(max_bytes=64 * MIB)
    array = pool.take(MIB)
    array[:] = 5
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        os._exit(0 if (array == 5).all() else 1)
    array[:] = 6
    os.write(go, b"x")
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(go)
    assert os.waitstatus_to_exitcode(status) == 0


def test_pinned_without_cuda_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pool = BufferPool(max_bytes=64 * MIB, pinned=True)
    assert not pool.pinned
    assert len(pool.take(MIB)) == MIB and pool.made == 1


def test_a_refusal_to_pin_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    pool = BufferPool(max_bytes=64 * MIB, pinned=True, device=torch.device("cuda", 1))
    assert pool.pinned
    held = [pool.take(MIB), pool.take(MIB)]
    assert not pool.pinned and pool.made == 2 and len(held[1]) == MIB
    assert caplog.text.count("cannot be page-locked") == 1


def test_pinned_memory_is_registered_once_and_unregistered_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: set[int] = set()

    class Cuda:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            registered.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            registered.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    pool = BufferPool(max_bytes=64 * MIB, pinned=True, device=torch.device("cuda", 0))
    for _ in range(3):
        array = pool.take(MIB)
        assert registered == {address(array)}
        del array
    pool.trim()
    assert not registered


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_the_memory_as_pinned() -> None:
    pool = BufferPool(max_bytes=64 * MIB, pinned=True)
    tensor = torch.from_numpy(pool.take(4 * MIB))
    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)


def test_batches_that_are_kept_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pack through the pool, its bound far below what a trainer keeps here."""
    monkeypatch.setattr(buffers, "SMALL_BYTES", 0)
    packs = synthetic_packs(24, seed=3)
    settings: dict[str, Any] = {"job": "test", "layout": ParallelLayout(), "micro_steps": 2}
    with FakeService(packs) as service:
        with PackStream(service.endpoint, digests=True, **settings) as stream:
            kept = list(stream)
        with PackStream(service.endpoint, digests=True, prefetch_bytes=1, **settings) as stream:
            assert_same_batches(kept, list(stream))
        with PackStream(service.endpoint, **settings) as stream:
            for batch, expected in zip(stream, kept, strict=True):
                assert torch.equal(batch["pixel_values"], expected["pixel_values"])
            assert stream._buffers.made < 24
