"""MosaicML Streaming: MDS shards on the local disk, a StreamingDataset that packs in its workers.

At its best: batches of the workers in any order; pictures are decoded by Pillow, as its own image
columns are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from peers.decoders import decoder_of
from peers.mosaic import streaming
from peers.work import Batch, Encoder, Sample, Setup, Started, as_tensors

REPEAT = 200
"""Passes of an epoch: workers wait for each other at its end."""
BATCH = 8
"""Samples in a row that go to the same worker."""


class Packs(streaming.StreamingDataset):
    def __init__(self, setup: Setup) -> None:
        streams = [streaming.Stream(local=str(setup.mds), repeat=REPEAT)]
        super().__init__(streams=streams, batch_size=BATCH, shuffle=False)
        self._setup = setup

    def __iter__(self) -> Iterator[Batch]:
        encoder = Encoder(decoder_of(self._setup))
        samples = (encoder.encode(sample_of(fields)) for fields in super().__iter__())
        return map(as_tensors, encoder.packs(samples))


def sample_of(fields: dict[str, Any]) -> Sample:
    return Sample(fields["record"], msgpack.unpackb(fields["images"]))


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    loader = streaming.StreamingDataLoader(
        Packs(setup),
        batch_size=None,
        num_workers=setup.workers,
        prefetch_factor=setup.prefetch,
        in_order=setup.column == "same",
    )
    yield iter(loader)
