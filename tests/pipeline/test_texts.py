"""dataservice.pipeline.texts: how the records of a pack are dealt to threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline.small_data import FORMATS, RULES, Data

from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.pipeline.texts import LOCAL_ITEMS, PackTexts


class Watched:
    """A pool that runs nothing."""

    num_threads = 4

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, compute: Callable[[], object], **_: object) -> object:
        self.submitted += 1
        return object()


@pytest.mark.parametrize(
    ("url", "items", "tasks"),
    [
        ("/data/a.jsonl", 0, 0),
        ("/data/a.jsonl", 3, 1),
        ("file:///data/a.jsonl", LOCAL_ITEMS + 1, 2),
        ("/data/a.jsonl", 9 * LOCAL_ITEMS, 4),
        ("s3://data/a.jsonl", 3, 3),
        ("s3://data/a.jsonl", 9, 4),
    ],
)
def test_records_of_files_share_a_task(tmp_path: Path, url: str, items: int, tasks: int) -> None:
    data, text = Data(tmp_path), TextRenderer.build(TextSettings())
    spec = data.pack(*[data.item(0, text)] * items, room=4)
    spec = replace(spec, shards=tuple(replace(shard, url=url) for shard in spec.shards))
    pool = Watched()
    PackTexts(spec, None, text, FORMATS, RULES, pool, 1.0, ()).start({})
    assert pool.submitted == tasks
