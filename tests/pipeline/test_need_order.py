from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline.small_data import FORMATS, RULES, Data

from dataservice.core.packspec import ImageSpec, PackSpec, ShardRef
from dataservice.pipeline.images import DecodeLimits, Prepared
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.objects import ShardReader

LONG_S = 30.0
SIZES = {"small.png": 24 * 16, "tall.jpg": 20 * 70, "large.jpg": 90 * 61}


class Held:
    """A decoder whose first picture waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[str] = []

    def prepare(self, data: bytes, image: ImageSpec) -> Prepared:
        self.order.append(image.member)
        assert self.gate.wait(LONG_S)
        return lambda out: out.fill(1)


class Stalled(ShardReader):
    """Reads of archives wait for the gate."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(None, deadline_s=LONG_S, retries=0)
        self._gate = gate

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
        if shard.name.endswith(".zip"):
            assert self._gate.wait(LONG_S)
        return super().read(shard, offset, size)

    def read_cached(self, shard: ShardRef, offset: int, size: int) -> None:
        return None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text() -> TextRenderer:
    return TextRenderer.build(TextSettings())


@pytest.fixture
def decoder() -> Iterator[Held]:
    made = Held()
    yield made
    made.gate.set()


@pytest.fixture
def builders(decoder: Held) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made
        decoder.gate.set()


Build = Callable[..., BuiltPack]


def build_with(reader: ShardReader, text: TextRenderer, decoder: Held, pools: BuildPools) -> Build:
    def build(spec: PackSpec, *need: int) -> BuiltPack:
        return build_pack(
            spec,
            reader=reader,
            renderer=text,
            formats=FORMATS,
            rules=RULES,
            holes={},
            storage_holes=False,
            decoder=decoder,
            limits=DecodeLimits(),
            pool=pools,
            need=need,
        )

    return build


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("at_hand", [True, False])
def test_pictures_of_the_pack_needed_first_go_before_and_the_largest_of_them_first(
    data: Data,
    text: TextRenderer,
    decoder: Held,
    builders: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    at_hand: bool,
) -> None:
    gate = threading.Event()
    gate.set()
    with (
        ShardReader(None, deadline_s=LONG_S) if at_hand else Stalled(gate) as reader,
        BuildPools(decode_threads=1, read_threads=2) as pools,
    ):
        queued, submit = [], pools.decodes.submit

        def counted(*given: Any, **named: Any) -> Any:
            job = submit(*given, **named)
            queued.append(job)
            return job

        monkeypatch.setattr(pools.decodes, "submit", counted)
        build = build_with(reader, text, decoder, pools)
        later = data.pack(data.item(3, text), data.item(1, text))
        first = builders.submit(build, later, 5, 0, 0)
        wait_until(lambda: len(queued) == 3 and len(decoder.order) == 1)
        second = builders.submit(build, data.pack(data.item(3, text), data.item(1, text)), 4, 7, 7)
        wait_until(lambda: len(queued) == 6)
        decoder.gate.set()
        arrays = [future.result(LONG_S).arrays for future in (first, second)]
    begun, rest = decoder.order[0], decoder.order[4:]
    assert decoder.order[1:4] == ["large.jpg", "tall.jpg", "small.png"]
    assert sorted([begun, *rest]) == sorted(SIZES)
    assert rest == sorted(rest, key=lambda name: -SIZES[name])
    assert all((a["pixel_values"] == 1).all() for a in arrays)


@pytest.mark.parametrize("stalled", ["decode", "read"])
def test_a_text_only_pack_waits_neither_for_decodes_nor_for_reads_of_pictures(
    data: Data,
    text: TextRenderer,
    decoder: Held,
    builders: ThreadPoolExecutor,
    stalled: str,
) -> None:
    gate = threading.Event()
    if stalled == "decode":
        gate.set()
    with Stalled(gate) as reader, BuildPools(decode_threads=1, read_threads=1) as pools:
        build = build_with(reader, text, decoder, pools)
        pictures = data.pack(*(data.item(i, text) for i in (1, 3)))
        slow = builders.submit(build, pictures, 0, 0, 0)
        wait_until(lambda: bool(decoder.order) or stalled == "read")
        quick = builders.submit(build, data.pack(data.item(0, text), data.item(2, text)), 1, 0, 0)
        ids = quick.result(LONG_S).arrays["input_ids"]
        assert not slow.done()
        gate.set()
        decoder.gate.set()
        assert (slow.result(LONG_S).arrays["pixel_values"] == 1).all()
    assert np.count_nonzero(ids != text.pad_token) > 100


def test_the_need_changes_nothing_in_the_pack(
    data: Data, text: TextRenderer, decoder: Held, tmp_path: Path
) -> None:
    decoder.gate.set()
    spec = data.pack(*(data.item(i, text) for i in (1, 0, 3)))
    with (
        ShardReader(None, deadline_s=LONG_S, retries=0) as reader,
        BuildPools(decode_threads=2) as pools,
    ):
        build = build_with(reader, text, decoder, pools)
        packs = [build(spec, *need) for need in ((), (0, 0, 0), (7, 1, 2))]
    for other in packs[1:]:
        assert other.meta == packs[0].meta
        assert all(
            array.tobytes() == other.arrays[name].tobytes()
            for name, array in packs[0].arrays.items()
        )
