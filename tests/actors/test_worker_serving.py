"""What a worker sends of a pack that is built."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dataservice.actors.worker import Worker
from dataservice.wire.codec import EncodedPack, PackDecoder
from dataservice.wire.messages import StreamPack

REQUEST = StreamPack(session=1, pack_id="0.0.0", dp_rank=0, wait_s=1.0)
NOISE = np.random.Generator(np.random.Philox(1)).integers(0, 256, (4000, 768), np.uint8)


class Built(Worker):
    """One whose only pack is `pack`."""

    def __init__(self, pack: EncodedPack) -> None:
        self.pack = pack
        self.given: list[EncodedPack] = []
        self._sending_bytes = 0

    async def whole_pack(self, request: StreamPack) -> EncodedPack:
        return self.pack

    def taken(self, request: StreamPack, pack: EncodedPack) -> None:
        self.given.append(pack)


@pytest.mark.parametrize(
    ("pixels", "smaller"), [(NOISE, False), (np.full_like(NOISE, 255), True)], ids=["photo", "page"]
)
def test_over_grpc_a_pack_is_compressed_where_it_shrinks(pixels: Any, smaller: bool) -> None:
    worker = Built(EncodedPack({"pixel_values": pixels}, {"pack_id": "0.0.0"}))

    async def frames() -> list[bytes]:
        return [frame async for frame in worker.stream_pack(REQUEST)]

    sent = asyncio.run(frames())
    decoder = PackDecoder()
    for frame in sent:
        decoder.feed(frame)
    assert np.array_equal(decoder.result()[0]["pixel_values"], pixels)
    assert (sum(map(len, sent)) < pixels.nbytes // 2) == smaller
    assert worker.given == [worker.pack]
