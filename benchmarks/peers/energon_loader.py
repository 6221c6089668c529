"""Megatron Energon: a crude WebDataset, a task encoder that packs from a buffer, its own loader.

Pictures are decoded once their pack is known (`preencode_sample`, `postencode_sample`), as its
documentation asks of packing. Its loader has the workers' batches in order always; at its best it
decodes with Pillow, as its own decoder does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from peers.decoders import decoder_of
from peers.work import PACK_LENGTH, Batch, Encoded, Encoder, Setup, Started, as_tensors
from peers.work import Sample as Stored

BUFFER = 64
"""Samples from which packs are chosen."""


@edataclass
class Raw(Sample):
    stored: Stored
    length: int = 0


@edataclass
class Decoded(Sample):
    encoded: Encoded


@edataclass
class Pack(Sample):
    batches: list[Batch]


@stateless
def cook(fields: dict[str, Any]) -> Raw:
    names = [name for name in fields if name[0].isdigit()]
    names.sort(key=lambda name: int(name.split(".")[0]))
    stored = Stored(fields["record"], [fields[name] for name in names])
    return Raw(**basic_sample_keys(fields), stored=stored)


class Packing(DefaultTaskEncoder):
    cookers = (Cooker(cook),)
    decoder = None

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._encoder = Encoder(decoder_of(setup))

    @stateless
    def preencode_sample(self, sample: Raw) -> Raw:
        sample.length = self._encoder.length(sample.stored)
        return sample

    def select_samples_to_pack(self, samples: list[Raw]) -> list[list[Raw]]:
        """First fit, longest first."""
        packs: list[list[Raw]] = []
        free: list[int] = []
        for sample in sorted(samples, key=lambda sample: -sample.length):
            fits = next((i for i, room in enumerate(free) if sample.length <= room), None)
            if fits is None:
                packs.append([sample])
                free.append(PACK_LENGTH - sample.length)
            else:
                packs[fits].append(sample)
                free[fits] -= sample.length
        return packs

    @stateless
    def postencode_sample(self, sample: Raw) -> Decoded:
        return Decoded.derive_from(sample, encoded=self._encoder.encode(sample.stored))

    @stateless
    def pack_selected_samples(self, samples: list[Decoded]) -> Pack:
        """A text longer than a pack is alone here, and several packs."""
        packs = self._encoder.packs(sample.encoded for sample in samples)
        return Pack.derive_from(samples[0], batches=[as_tensors(pack) for pack in packs])

    def batch(self, samples: Sequence[Pack]) -> list[Batch]:
        return [batch for sample in samples for batch in sample.batches]

    @stateless
    def encode_batch(self, batch: list[Batch]) -> list[Batch]:
        return batch


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    dataset = get_train_dataset(
        str(setup.tars),
        worker_config=WorkerConfig.default_worker_config(setup.workers),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        packing_buffer_size=BUFFER,
        task_encoder=Packing(setup),
    )
    loader = get_savable_loader(dataset, prefetch_factor=setup.prefetch)
    yield (batch for packs in loader for batch in packs)
