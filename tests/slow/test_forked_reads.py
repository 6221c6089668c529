"""Eight processes with eight threads read random members for 30 s after a fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forked_reads import make_images, read_after_fork

from dataservice.storage.objects import ShardReader


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_crc_is_right(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    with ShardReader(None, deadline_s=60) as reader:
        counts = read_after_fork(reader, images, processes=8, threads=8, seconds=30)
    print(f"{sum(counts)} members read by {len(counts)} processes")
    assert len(counts) == 8 and min(counts) > 0
