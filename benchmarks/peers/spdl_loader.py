"""SPDL: a pipeline of threads in one process, its default: read, decode, pack.

In order the stages keep the order of their inputs. At its best they do not, and pictures are
decoded by `spdl.io`, but for PNG, where Pillow is faster; where the libraries of FFmpeg, which
`spdl.io` does not bring along, are not installed, Pillow decodes all. A stage that raises would
lose its sample and go on: here it ends the run.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from PIL import Image
from spdl.pipeline import PipelineBuilder

from peers.decoders import decoder_of, pillow, spdl_ffmpeg
from peers.reading import Reader, endless
from peers.work import (
    Batch,
    Encoder,
    Filling,
    Picture,
    Sample,
    Setup,
    Started,
    as_tensors,
    read_entries,
)

PNG = b"\x89PNG"


def best(data: bytes) -> Picture:
    return pillow(data) if data.startswith(PNG) or not has_ffmpeg() else spdl_ffmpeg(data)


@cache
def has_ffmpeg() -> bool:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "JPEG")
    try:
        spdl_ffmpeg(picture.getvalue())
    except RuntimeError as error:
        print(f"spdl.io cannot decode, Pillow does: {str(error)[:200]}", file=sys.stderr)
        return False
    return True


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    encoder, reader, filling = Encoder(decoder_of(setup, best)), Reader(), Filling()
    order = "input" if setup.column == "same" else "completion"
    failures: list[Exception] = []

    def encoded(sample: Sample) -> Any:
        try:
            return encoder.encode(sample)
        except Exception as error:
            failures.append(error)
            raise

    def whole(found: Iterator[Batch]) -> Iterator[Batch]:
        for batch in found:
            if failures:
                raise failures[0]
            yield batch

    pipeline = (
        PipelineBuilder()
        .add_source(endless(read_entries(setup.mixed)))
        .pipe(reader.read, output_order=order)
        .pipe(encoded, concurrency=setup.workers, output_order=order)
        .pipe(filling.add)
        .pipe(lambda pieces: as_tensors(encoder.build(pieces)), output_order=order)
        .add_sink(setup.workers * setup.prefetch)
        .build(num_threads=setup.workers + 1)
    )
    with pipeline.auto_stop():
        yield whole(pipeline.get_iterator())
