"""WebDataset: tars split among the workers of a WebLoader, packs as a stage of the pipeline.

At its best: `decode("pilrgb")`, with a handler for WebP, which it does not know, and batches of the
workers in any order.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import webdataset as wds
from PIL import Image

from peers.decoders import decoder_of, from_pil
from peers.work import Batch, Encoded, Encoder, Sample, Setup, Started, as_tensors


def decode_webp(key: str, data: bytes) -> Image.Image | None:
    if not key.endswith("webp"):
        return None
    with Image.open(io.BytesIO(data)) as picture:
        return picture.convert("RGB")


@contextmanager
def batches(setup: Setup, started: Started) -> Iterator[Iterator[Batch]]:
    started()
    encoder = Encoder(decoder_of(setup))

    def parts(fields: dict[str, Any]) -> list[Any]:
        """The images of a sample: "0.jpg", "1.png" and so on."""
        names = [name for name in fields if name[0].isdigit()]
        return [fields[name] for name in sorted(names, key=lambda name: int(name.split(".")[0]))]

    def encode_bytes(fields: dict[str, Any]) -> Encoded:
        return encoder.encode(Sample(fields["record"], parts(fields)))

    def encode_decoded(fields: dict[str, Any]) -> Encoded:
        return encoder.finish(fields["record"], [from_pil(part) for part in parts(fields)])

    def pack(samples: Iterable[Encoded]) -> Iterator[Batch]:
        return map(as_tensors, encoder.packs(samples))

    same = setup.column == "same"
    urls = sorted(str(path) for path in setup.tars.glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=False).repeat()
    if same:
        dataset = dataset.map(encode_bytes)
    else:
        dataset = dataset.decode(decode_webp, "pilrgb").map(encode_decoded)
    loader = wds.WebLoader(
        dataset.compose(pack),
        batch_size=None,
        num_workers=setup.workers,
        prefetch_factor=setup.prefetch,
        in_order=same,
    )
    yield iter(loader)
