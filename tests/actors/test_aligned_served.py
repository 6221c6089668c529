"""Aligned documents through the whole service, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService


def test_a_rank_reads_aligned_documents(tmp_path: Path) -> None:
    config = demo_config(tmp_path, plan={"align": 16})
    seen = {"documents": 0, "filler": 0}

    def look(batch: Any) -> None:
        bounds, lengths = batch["cu_seqlens"], batch["doc_lengths"]
        assert (bounds % 16 == 0).all()
        filler = batch["position_ids"] >= lengths.repeat_interleave(bounds.diff())
        assert (batch["labels"][filler] == -100).all()
        assert (batch["doc_ids"][filler] == -1).all()
        seen["documents"] += len(lengths)
        seen["filler"] += int(filler.sum())

    with LocalService(config) as service:
        read_ranks(service.endpoint, job="test", dp_size=1, micro_steps=2, steps=3, on_batch=look)
    assert 0 < seen["filler"] < 16 * seen["documents"]
