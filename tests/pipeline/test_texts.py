"""dataservice.pipeline.texts: which thread makes the texts of a pack."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pipeline.small_data import FORMATS, RULES, Data

from dataservice.core.packspec import ShardRef
from dataservice.pipeline.pool import DeadlinePool
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.pipeline.texts import PackTexts
from dataservice.storage.objects import ShardReader

LONG_S = 30.0


class Reader(ShardReader):
    """Notes which threads read; `misses` of its looks at what is at hand find nothing."""

    def __init__(self, misses: int) -> None:
        super().__init__(None, deadline_s=LONG_S)
        self.misses = misses
        self.threads: set[str] = set()

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes:
        self.threads.add(threading.current_thread().name)
        return super().read(shard, offset, size)

    def read_cached(self, shard: ShardRef, offset: int, size: int) -> bytes | None:
        self.misses -= 1
        if self.misses == 0:
            return None
        return Path(shard.url).read_bytes()[offset : offset + size]


@pytest.mark.parametrize("misses", [0, 1, 3])
def test_records_at_hand_wake_no_thread(tmp_path: Path, misses: int) -> None:
    data, text = Data(tmp_path), TextRenderer.build(TextSettings())
    spec = data.pack(*(data.item(i, text) for i in (0, 1, 5)))
    with Reader(misses) as reader, DeadlinePool(2, name="texts") as pool:
        texts = PackTexts(spec, reader, text, FORMATS, RULES, pool, LONG_S, ())
        texts.start({})
        rendered, holes = texts.finish(storage_holes=False)
        texts.cancel()
        assert (pool.completed > 0) == (misses > 0)
    assert bool(reader.threads) == (misses > 0)
    assert all(name.startswith("texts") for name in reader.threads)
    assert holes == {}
    assert [len(found.ids) for found in rendered] == [item.total_tokens for item in spec.items]
    said = [text.decode(found.ids) for found in rendered]
    begins = ("A first", "Look: ", "Before ")
    assert all(what in found for what, found in zip(begins, said, strict=True))
