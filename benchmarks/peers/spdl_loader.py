"""SPDL: a pipeline of threads in one process, its default: read, decode, pack.

In order the stages keep the order of their inputs. At its best they do not, and pictures are
decoded by `spdl.io` (FFmpeg), but for PNG, where Pillow is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spdl.pipeline import PipelineBuilder

from peers.decoders import decoder_of, pillow, spdl_ffmpeg
from peers.reading import Reader, endless
from peers.work import Batch, Encoder, Filling, Picture, Setup, Started, as_tensors, read_entries

PNG = b"\x89PNG"


def best(data: bytes) -> Picture:
    return pillow(data) if data.startswith(PNG) else spdl_ffmpeg(data)


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    encoder, reader, filling = Encoder(decoder_of(setup, best)), Reader(), Filling()
    order = "input" if setup.column == "same" else "completion"
    pipeline = (
        PipelineBuilder()
        .add_source(endless(read_entries(setup.mixed)))
        .pipe(reader.read, output_order=order)
        .pipe(encoder.encode, concurrency=setup.workers, output_order=order)
        .pipe(filling.add)
        .pipe(lambda pieces: as_tensors(encoder.build(pieces)), output_order=order)
        .add_sink(setup.workers * setup.prefetch)
        .build(num_threads=setup.workers + 1)
    )
    with pipeline.auto_stop():
        yield iter(pipeline.get_iterator())
