"""The bare loop: processes that read, decode and pack, and hand nothing over.

What no transport, order or consumer holds back; they take turns at blocks of the same samples.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from peers.decoders import ours
from peers.reading import Reader
from peers.work import Batch, Encoded, Encoder, Setup, Started, read_entries

BLOCK = 8
POLL_S = 0.005
COUNTS = ("num_samples", "num_images", "num_tokens", "num_packs")


def work(setup: Setup, next_block: Any, counts: Any, stop: Any) -> None:
    entries = read_entries(setup.mixed)
    encoder, reader = Encoder(ours(exact=setup.exact)), Reader()

    def samples() -> Iterator[Encoded]:
        while not stop.is_set():
            with next_block.get_lock():
                block = next_block.value
                next_block.value += 1
            for number in range(block * BLOCK, (block + 1) * BLOCK):
                yield encoder.encode(reader.read(entries[number % len(entries)]))

    for pack in encoder.packs(samples()):
        done = (pack["num_samples"], len(pack["image_grid_thw"]), pack["num_tokens"], 1)
        with counts.get_lock():
            for i, more in enumerate(done):
                counts[i] += more


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    """Yields counts alone, whenever a pack was built."""
    started()
    context = multiprocessing.get_context("spawn")
    next_block, counts = context.Value("q", 0), context.Array("q", len(COUNTS))
    stop = context.Event()
    processes = [
        context.Process(target=work, args=(setup, next_block, counts, stop))
        for _ in range(setup.workers)
    ]
    for process in processes:
        process.start()

    def changes() -> Iterator[Batch]:
        seen = np.zeros(len(COUNTS), np.int64)
        while all(process.is_alive() for process in processes):
            with counts.get_lock():
                now = np.array(counts[:])
            if (now != seen).any():
                yield dict(zip(COUNTS, (now - seen).tolist(), strict=True))
                seen = now
            time.sleep(POLL_S)
        raise RuntimeError("a process of the bare loop ended")

    try:
        yield changes()
    finally:
        stop.set()
        for process in processes:
            process.join(10.0)
            process.kill()
