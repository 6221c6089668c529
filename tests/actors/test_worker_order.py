from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.actors.building import builders
from dataservice.pipeline.images import ImageDecoder
from trainer_client import PackStream, ParallelLayout

LONG_S = 60.0
STEPS_AHEAD = 6


def test_one_builder_more_than_decode_threads_and_one_for_texts_alone() -> None:
    for threads in (1, 4):
        made = builders(threads)
        assert sum(text_only for _, text_only in made) == 1
        assert len(made) == threads + 2
        assert len({name for name, _ in made}) == len(made)


def test_text_only_packs_are_ready_while_no_picture_can_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, prepare = threading.Event(), ImageDecoder.prepare

    def held(*given: Any) -> Any:
        assert gate.wait(LONG_S)
        return prepare(*given)

    monkeypatch.setattr(ImageDecoder, "prepare", held)
    config = demo_config(
        tmp_path,
        plan={"segregate": {"text": {"micro_steps": 1}, "vision": {"micro_steps": 1}}},
        serving={"plan_ahead_steps": STEPS_AHEAD},
    )
    try:
        with (
            LocalService(config) as service,
            PackStream(
                service.endpoint,
                job="test",
                layout=ParallelLayout.data_parallel(0, 1),
                micro_steps=2,
                timeout_s=LONG_S,
            ) as stream,
        ):
            assert next(stream)["image_grid_thw"].shape[0] == 0
            end, ready = time.monotonic() + LONG_S, 0
            while ready < STEPS_AHEAD - 1 and time.monotonic() < end:
                worker = service.status()["workers"][0]
                ready = worker["ready_packs"]
                time.sleep(0.02)
            assert ready >= STEPS_AHEAD - 1
            assert worker["images"] == 0
            gate.set()
            assert next(stream)["image_grid_thw"].shape[0] > 0
    finally:
        gate.set()
