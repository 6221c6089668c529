"""What test_redistribute.py runs on every rank: each check returns what its rank saw, as JSON."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dataservice.errors import DataServiceError
from trainer_client import MicroBatch, VisionInfo
from trainer_client.batch import build_micro_batch
from trainer_client.redistribute import RebalancedLoader
from trainer_client.testing.synthetic import FAKE_INFO, FakePack, synthetic_packs

MICRO_STEPS = 3
STEPS = 4
LONG_STEPS = 60
MOST_PACKS = 32
TIMEOUT_S = 60.0
Check = Callable[[int, int], Any]


def micro_batch(pack: FakePack, name: str) -> MicroBatch:
    meta = {"step": -1, "micro_step": 0, "pack_ids": [name]}
    return build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta=meta,
        is_last_micro_step=False,
        vision=VisionInfo.of(FAKE_INFO),
    )


class Source:
    """`count` packs of one rank, named "RANK.NUMBER"; a Stateful."""

    def __init__(self, rank: int, count: int, *, fail_at: int = -1, hang_at: int = -1) -> None:
        self.names = [f"{rank}.{i}" for i in range(count)]
        self._packs = synthetic_packs(MOST_PACKS, seed=rank)[:count]
        self._fail_at, self._hang_at = fail_at, hang_at
        self.next = 0
        self.given: dict[str, MicroBatch] = {}
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[MicroBatch]:
        while self.next < len(self._packs):
            number = self.next
            if number == self._fail_at:
                raise OSError("the disk is gone")
            if number == self._hang_at:
                self.closed.wait(TIMEOUT_S)
                raise OSError("closed")
            self.next += 1
            name = self.names[number]
            self.given[name] = micro_batch(self._packs[number], name)
            yield self.given[name]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def close(self) -> None:
        self.closed.set()


def digest(batch: MicroBatch) -> str:
    sha = hashlib.sha256()
    for name, value in sorted(batch.items()):
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


def told(batch: MicroBatch) -> list[Any]:
    meta = batch.meta
    return [
        batch.step,
        batch.micro_step,
        batch.is_last_micro_step,
        meta["pack_ids"],
        digest(batch),
        meta["loss_tokens"],
        meta["num_images"],
        meta["ranks_without_images"],
        meta["sample_keys"],
        meta["dp_rank"],
    ]


def loader(source: Any, **settings: Any) -> RebalancedLoader:
    return RebalancedLoader(
        source, **{"micro_steps": MICRO_STEPS, "timeout_s": TIMEOUT_S, **settings}
    )


def all_of(rank: int, **settings: Any) -> list[Any]:
    per_rank = MICRO_STEPS * settings.get("packs_per_cell", 1)
    with loader(Source(rank, STEPS * per_rank), **settings) as batches:
        return [told(batch) for batch in batches]


def error_of(work: Callable[[], Any]) -> list[str]:
    try:
        work()
    except DataServiceError as error:
        return [type(error).__name__, str(error)]
    except OSError as error:
        return [type(error).__name__, str(error)]
    return []


# ---- checks -------------------------------------------------------------------------------------


def overlapped(rank: int, ranks: int) -> Any:
    return all_of(rank)


def synchronous(rank: int, ranks: int) -> Any:
    return all_of(rank, overlap=False)


def two_packs_a_cell(rank: int, ranks: int) -> Any:
    return all_of(rank, packs_per_cell=2, sync_domain=1)


def sources(rank: int, ranks: int) -> Any:
    source = Source(rank, STEPS * MICRO_STEPS * 2)
    return {
        name: [digest(batch), int((batch["labels"] != -100).sum()), len(batch["image_grid_thw"])]
        for name, batch in zip(source.names, source, strict=True)
    }


def in_place(rank: int, ranks: int) -> Any:
    """Own packs keep their memory; equal costs move nothing."""
    source, kept = Source(rank, STEPS * MICRO_STEPS), 0
    with loader(source) as batches:
        for batch in batches:
            own = source.given.get(batch.meta["pack_ids"][0])
            kept += own is not None
            assert own is None or own["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
        stats = batches.stats()
    with loader(Source(rank, STEPS * MICRO_STEPS), cost=lambda pack: 7) as batches:
        order = [batch.meta["pack_ids"] for batch in batches]
        assert batches.stats().moved_packs == 0
    return {"kept": kept, "moved": stats.moved_packs, "bytes": stats.moved_bytes, "order": order}


def uneven(rank: int, ranks: int) -> Any:
    """Rank 0 has a step less than the others, rank 2 a pack more."""
    counts = [(STEPS - 1) * MICRO_STEPS, STEPS * MICRO_STEPS, STEPS * MICRO_STEPS + 1]
    seen: dict[str, Any] = {}
    for remainder in ("pad", "drop"):
        with loader(Source(rank, counts[rank]), remainder=remainder) as batches:
            seen[remainder] = [told(batch) for batch in batches]
            assert next(batches, None) is None
            seen[remainder + " dropped"] = batches.stats().dropped_packs
    return seen


def nothing_at_all(rank: int, ranks: int) -> Any:
    with loader(Source(rank, 0)) as batches:
        return [told(batch) for batch in batches]


def resumed(rank: int, ranks: int) -> Any:
    """Cut between and inside steps; each time the whole must be the same."""
    seen = []
    for cut in (0, 1, MICRO_STEPS, 2 * MICRO_STEPS - 1):
        with loader(Source(rank, STEPS * MICRO_STEPS)) as batches:
            before = [told(batch) for _, batch in zip(range(cut), batches, strict=False)]
            state = batches.state_dict()
        with loader(Source(rank, STEPS * MICRO_STEPS)) as batches:
            batches.load_state_dict(state)
            assert batches.state_dict() == state
            seen.append(before + [told(batch) for batch in batches])
    return seen


def failing_source(rank: int, ranks: int) -> Any:
    seen: dict[str, Any] = {}
    for overlap in (True, False):
        source = Source(rank, STEPS * MICRO_STEPS, fail_at=MICRO_STEPS + 1 if rank == 1 else -1)
        with loader(source, overlap=overlap) as batches:
            error = error_of(lambda batches=batches: list(batches))
            again = error_of(lambda batches=batches: next(batches))
            seen[str(overlap)] = [batches.stats().batches, error, again]
    return seen


def failing_cost(rank: int, ranks: int) -> Any:
    with loader(Source(rank, 9), cost=lambda pack: -1 if rank == 2 else 1) as batches:
        return error_of(lambda: next(batches))


def other_settings(rank: int, ranks: int) -> Any:
    with loader(Source(rank, 9), micro_steps=MICRO_STEPS + (rank == 2)) as batches:
        return error_of(lambda: next(batches))


def other_states(rank: int, ranks: int) -> Any:
    with loader(Source(rank, 9)) as batches:
        next(batches)
        states = [batches.state_dict()]
        next(batches)
        states.append(batches.state_dict())
    with loader(Source(rank, 9)) as batches:
        batches.load_state_dict(states[rank == 1])
        return error_of(lambda: next(batches))


def hanging_source(rank: int, ranks: int) -> Any:
    source = Source(rank, 9, hang_at=4 if rank == 1 else -1)
    started = time.monotonic()
    with loader(source, timeout_s=6.0) as batches:
        error = error_of(lambda: list(batches))
        took_s = time.monotonic() - started
    return [took_s, error]


def closed_by_one(rank: int, ranks: int) -> Any:
    with loader(Source(rank, 9)) as batches:
        if rank == 0:
            next(batches)
            return []
        return error_of(lambda: list(batches))


def closed_by_all(rank: int, ranks: int) -> Any:
    """In the middle, with a thread ahead of the trainer; again and again."""
    started = time.monotonic()
    for _ in range(3):
        with loader(Source(rank, 30), timeout_s=300.0) as batches:
            for _, _ in zip(range(4), batches, strict=False):
                pass
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    return [time.monotonic() - started, [name for name in names if "rebalanced" in name]]


def subgroup(rank: int, ranks: int) -> Any:
    """Rank 1 is no data-parallel rank."""
    group = dist.new_group([0, 2], backend="gloo")
    if rank == 1:
        return []
    with loader(Source(rank, STEPS * MICRO_STEPS), own_group=group) as batches:
        return [told(batch) for batch in batches]


def beside_the_trainer(rank: int, ranks: int) -> Any:
    """Collectives of the trainer on the default group while the thread exchanges."""
    total = 0
    with loader(Source(rank, STEPS * MICRO_STEPS)) as batches:
        for batch in batches:
            cost = torch.tensor([len(batch["pixel_values"])])
            dist.all_reduce(cost)
            total += int(cost)
    return total


def left_behind(rank: int, ranks: int) -> Any:
    """[descriptors, threads, micro-batches alive]: early and late in a loader, and after others."""

    def held() -> list[int]:
        gc.collect()
        dist.barrier()
        alive = sum(type(one) is MicroBatch for one in gc.get_objects())
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), alive]

    def packs() -> Iterator[MicroBatch]:
        templates = list(Source(rank, 10))
        for number in range(LONG_STEPS * MICRO_STEPS):
            pack = MicroBatch(templates[number % 10])
            pack.__dict__.update(templates[number % 10].__dict__)
            yield pack

    seen = []
    with loader(packs(), cost=lambda pack: len(pack["pixel_values"])) as batches:
        for batch in batches:
            if batch.is_last_micro_step and batch.step in (10, LONG_STEPS - 10):
                seen.append(held())
    del batch, batches
    closed = held()
    for _ in range(3):
        all_of(rank)
    return {"running": seen, "closed": [closed, held()]}


CHECKS: list[Check] = [
    overlapped,
    synchronous,
    two_packs_a_cell,
    sources,
    in_place,
    uneven,
    nothing_at_all,
    resumed,
    failing_source,
    failing_cost,
    other_settings,
    other_states,
    hanging_source,
    closed_by_one,
    closed_by_all,
    subgroup,
    beside_the_trainer,
    left_behind,
]


def all_checks(rank: int, ranks: int) -> dict[str, Any]:
    seen = {}
    for check in CHECKS:
        seen[check.__name__] = check(rank, ranks)
        dist.barrier()
    return seen
