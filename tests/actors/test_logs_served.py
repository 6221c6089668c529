"""Logs of a service at work, as JSON: a line about a pack says of which step and rank it is."""

from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path

from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.obs.logs import JsonFormatter
from trainer_client import PackStream, ParallelLayout


def test_a_hole_and_what_led_to_it_say_where_they_are(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path,
        workers={"max_image_pixels": 1000},  # each picture is a hole
        errors={"max_hole_share": 1.0, "max_holes_in_a_row": 100_000},
    )
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter({"job": config.job}))
    log = logging.getLogger("dataservice.actors.hole_desk")
    log.addHandler(handler)
    try:
        with LocalService(config, workers=1) as service:
            with PackStream(
                service.endpoint, job=config.job, layout=ParallelLayout(), micro_steps=2
            ) as stream:
                batches = [next(stream) for _ in range(30)]
    finally:
        log.removeHandler(handler)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert lines and all(line["message"].startswith("hole: ") for line in lines)
    steps_of = {p: batch.step for batch in batches for p in batch.meta["pack_ids"]}
    told = {line["pack"]: line["step"] for line in lines if line["pack"] in steps_of}
    assert told and all(steps_of[pack_id] == step for pack_id, step in told.items())
    assert {line["dp_rank"] for line in lines} == {0}
    assert {line["job"] for line in lines} == {"test"}
