"""torch's DataLoader over an IterableDataset that packs; a worker process reads every n-th sample.

In order it is the DataLoader as it comes. At its best: batches in any order (`in_order=False`) and
Pillow, as the tutorials have it; the loader "torch-draft" decodes with Pillow's `draft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from peers.decoders import decoder_of, pillow, pillow_draft
from peers.reading import Reader, endless
from peers.work import Batch, Encoder, Setup, Started, as_tensors, read_entries


class Packs(IterableDataset[Batch]):
    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        assert info is not None
        entries = read_entries(self._setup.mixed)[info.id :: info.num_workers]
        best = pillow_draft if self._setup.loader == "torch-draft" else pillow
        encoder, reader = Encoder(decoder_of(self._setup, best)), Reader()
        samples = (encoder.encode(reader.read(entry)) for entry in endless(entries))
        return map(as_tensors, encoder.packs(samples))


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    loader = DataLoader(
        Packs(setup),
        batch_size=None,
        num_workers=setup.workers,
        prefetch_factor=setup.prefetch,
        in_order=setup.column == "same",
    )
    yield iter(loader)
