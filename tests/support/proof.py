"""What a fault test proves: the same packs as an undisturbed run, and nothing left behind.

Invariants: a proof compares what the trainers had in hand, pack by pack of each step, whichever
rank got it; what another program of this machine holds is no leak of ours.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from grpc.aio import init_grpc_aio

from dataservice.config import Config, config_to_json
from dataservice.errors import DataServiceError
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus
from support.harness import Delivery, Readers, read_ranks
from support.local_service import LocalService

MARK = "DATASERVICE_TEST_MARK"
SETTLE_S = 5.0
_KEPT_BY_GRPC = re.compile(r"anon_inode:\[?(eventpoll|eventfd|timerfd)\]?")
_clean: dict[tuple[object, ...], Readers] = {}


def clean_run(config: Config, *, dp_size: int, micro_steps: int, steps: int | None) -> Readers:
    """What an undisturbed run of `config` gives, with a journal and a cache of its own."""
    key = (config_to_json(config), dp_size, micro_steps, steps)
    if key not in _clean:
        with tempfile.TemporaryDirectory(prefix="clean-") as folder:
            staging = config.staging
            if staging.cache_dir is not None:
                staging = dataclasses.replace(staging, cache_dir=f"{folder}/cache")
            own = dataclasses.replace(config, state_dir=f"{folder}/state", staging=staging)
            with LocalService(own) as service:
                _clean[key] = read_ranks(
                    service.endpoint,
                    job=config.job,
                    dp_size=dp_size,
                    micro_steps=micro_steps,
                    steps=steps,
                )
    return _clean[key]


def prove_same(clean: Readers, deliveries: Iterable[Delivery]) -> None:
    """Every pack of every step exactly once with equal digests; AssertionError names the first
    difference."""
    deliveries = list(deliveries)
    places = Counter((d.step, d.micro_step, d.dp_rank) for d in deliveries)
    twice = sorted(place for place, count in places.items() if count > 1)
    assert not twice, f"(step, micro-step, rank) delivered more than once, first {twice[0]}"
    expected, got = _packs(clean.deliveries), _packs(deliveries)
    for step, pack_id, digest in sorted(expected.keys() | got.keys()):
        pack = (step, pack_id, digest)
        if expected[pack] == got[pack]:
            continue
        others = sorted(d for s, p, d in got if (s, p) == (step, pack_id) and d != digest)
        raise AssertionError(
            f"step {step}: pack {pack_id} with digest {digest} came {got[pack]} times, should "
            f"come {expected[pack]} times; its other digests: {others}"
        )


def _packs(deliveries: Iterable[Delivery]) -> Counter[tuple[int, str, str]]:
    return Counter(
        (d.step, pack_id, digest)
        for d in deliveries
        for pack_id, digest in zip(d.pack_ids, d.digests, strict=True)
    )


def longest_gap(deliveries: Iterable[Delivery]) -> float:
    """Seconds between two micro-batches of a rank, at most; 0 for one or none."""
    last: dict[int, float] = {}
    longest = 0.0
    for delivery in sorted(deliveries, key=lambda d: d.at):
        if delivery.dp_rank in last:
            longest = max(longest, delivery.at - last[delivery.dp_rank])
        last[delivery.dp_rank] = delivery.at
    return longest


# ---- leaks ---------------------------------------------------------------------------------------


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Processes started within (also those whose parent died), descriptors, threads, /dev/shm and
    our temporary files are as before once the block has ended; waits SETTLE_S for them to go."""
    _warm_grpc()
    mark = uuid.uuid4().hex
    outer = os.environ.get(MARK)
    os.environ[MARK] = mark if outer is None else f"{outer},{mark}"
    before = _held(mark)
    try:
        yield
    finally:
        if outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = outer
    until = time.monotonic() + SETTLE_S
    while leaks := _new(before, _held(mark)):
        if time.monotonic() > until:
            raise AssertionError(f"left behind: {'; '.join(leaks)}")
        time.sleep(0.05)


def _warm_grpc() -> None:
    """gRPC keeps what it opens at its first call; asyncio's, without this, until the collector has
    found the last of its objects."""

    async def warm() -> None:
        init_grpc_aio()

    asyncio.run(warm())
    with suppress(DataServiceError), CoordinatorClient("127.0.0.1:1") as client:
        client.call(GetStatus(), timeout_s=0.5)


def _held(mark: str) -> dict[str, Counter[str]]:
    return {
        "process": Counter(_marked(mark)),
        "descriptor": Counter(_descriptors()),
        "thread": Counter(thread.name for thread in threading.enumerate()),
        "file": Counter(_files()),
    }


def _new(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> list[str]:
    found = []
    for kind, names in after.items():
        for name in (names - before[kind]).elements():
            if kind == "file" and _held_by_others(name):
                continue
            found.append(f"{kind} {name}")
    return found


def _marked(mark: str) -> Iterator[str]:
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            if mark in process.environ().get(MARK, "") and process.status() != "zombie":
                yield f"{process.pid} {' '.join(process.cmdline())[:200]}"
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.status() == "zombie":
                yield f"{child.pid} (zombie)"


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not _KEPT_BY_GRPC.match(target) and not target.startswith("/proc/"):
                yield re.sub(r"(socket|pipe):\[\d+\]", r"\1", target)


def _files() -> Iterator[str]:
    for path in Path("/dev/shm").iterdir():
        yield str(path)
    for path in Path(tempfile.gettempdir()).glob("dataservice-*"):
        yield str(path)


def _held_by_others(path: str) -> bool:
    """Another program, not started here, has it open or mapped, or is named in it."""
    ours = {os.getpid()}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        if f"-{process.pid}-" in path:
            return True
        with suppress(OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            folder = f"/proc/{process.pid}/fd"
            if any(os.readlink(f"{folder}/{fd}") == path for fd in os.listdir(folder)):
                return True
    return False
