"""A client that stops in the middle: others go on as before, and nobody's memory grows for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.wire.messages import StreamPack
from trainer_client import PackStream, ParallelLayout
from trainer_client.buffers import BufferPool
from trainer_client.fetching import WorkerLink

MIB = 1 << 20
PACK_BYTES = 8 * MIB
DEADLINE_S = 60.0

SERVER = """
import asyncio, sys
import numpy as np
from dataservice.rpc.local_server import start_local_server
from dataservice.rpc.server import start_server
from dataservice.wire.encoded import EncodedPack

class Packs:
    def __init__(self, size):
        pixels = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.pack = EncodedPack({"pixel_values": pixels}, {})
    async def stream_pack(self, request):
        for frame in self.pack.frames():
            yield frame
    async def whole_pack(self, request):
        return self.pack
    def taken(self, request, pack):
        pass

async def main():
    packs = Packs(int(sys.argv[1]))
    server = await start_server(data=packs)
    local = start_local_server(packs, server.endpoint)
    print(server.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await local.stop(0)
    await server.stop(0)

asyncio.run(main())
"""

STALLED = """
import signal, sys
from dataservice.rpc import local_client
from dataservice.rpc.client import DataClient
from dataservice.wire.messages import StreamPack
from dataservice.wire.schema import encode

endpoint, way = sys.argv[1:]
request = StreamPack(session=1, pack_id="0.0.0", dp_rank=1, wait_s=1.0)
if way == "remote":
    client = DataClient(endpoint)
    frames = client.stream_pack(request, 300.0)
    next(frames)
else:
    client = local_client.connect(endpoint)
    client.fetch(request, 30.0)
    client._socket.send(encode(request))
print("stops", flush=True)
signal.raise_signal(signal.SIGSTOP)
"""


@contextmanager
def running(script: str, *arguments: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the first line it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


def memory_bytes(process: subprocess.Popen[str]) -> int:
    """Resident, without pages of files."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def read(endpoint: str, packs: int) -> None:
    """So many packs, by two clients at once, one for each way."""
    failures: list[BaseException] = []

    def fetch(local: bool) -> None:
        link, pool = WorkerLink(endpoint, local=local), BufferPool(max_bytes=3 * PACK_BYTES)
        request = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)
        try:
            for _ in range(packs):
                (arrays, _), locally = link.fetch(request, timeout_s=30.0, allocate=pool.take)
                assert locally == local and arrays["pixel_values"].nbytes == PACK_BYTES
                del arrays
            assert pool.made == 1
        except BaseException as error:
            failures.append(error)
        finally:
            link.close()

    threads = [threading.Thread(target=fetch, args=(local,)) for local in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a stalled client holds others up"
    assert not failures, failures


def test_stalled_processes_hold_up_nobody_and_cost_a_pack_each() -> None:
    with ExitStack() as stack:
        server, endpoint = stack.enter_context(running(SERVER, PACK_BYTES))
        read(endpoint, 20)
        alone = memory_bytes(server)
        stalled = []
        for way in ("remote", "local", "remote", "local"):
            process, said = stack.enter_context(running(STALLED, endpoint, way))
            assert said == "stops"
            stalled.append(process)
        read(endpoint, 5)
        began = memory_bytes(server), [memory_bytes(process) for process in stalled]
        assert began[0] - alone < len(stalled) * 2 * PACK_BYTES
        for _ in range(2):
            read(endpoint, 20)
            assert memory_bytes(server) - began[0] < PACK_BYTES
        for process, before in zip(stalled, began[1], strict=True):
            assert memory_bytes(process) - before < MIB


def test_a_rank_that_takes_nothing_fills_its_share_of_a_worker_alone(tmp_path: Path) -> None:
    bound, steps = 2 * MIB, 12
    config = demo_config(
        tmp_path,
        workers={"ready_bytes": "2 MiB"},
        serving={"plan_ahead_steps": 2 * steps},
    )
    settings: dict[str, Any] = {
        "job": "test",
        "run_id": "stalled",
        "micro_steps": 2,
        "timeout_s": DEADLINE_S,
        "prefetch_packs": 2,
        "prefetch_bytes": MIB,
    }
    with LocalService(config) as service:
        (runner,) = service.workers.values()
        quick, stalled = (
            PackStream(service.endpoint, layout=ParallelLayout.data_parallel(rank, 2), **settings)
            for rank in range(2)
        )
        with quick, stalled:
            opener = threading.Thread(target=stalled.open)
            opener.start()
            largest = 0
            for _ in range(2 * steps):
                batch = next(quick)
                largest = max(largest, batch.size_bytes)
                held, _, _ = runner.actor.tools.queue.figures()
                assert held <= bound + 2 * largest
            opener.join(DEADLINE_S)
            assert batch.step == steps - 1
            assert stalled.stats().batches == 0
            assert stalled.stats().peak_held_packs <= 2
            assert next(stalled).step == 0
