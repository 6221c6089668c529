"""One rank stops reading: the others go on to the end of the window, then are told who holds them
up; when it goes on, so do all, with the same packs."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks
from support.rank_processes import RankProcesses

from dataservice.errors import DeadlineExceeded
from trainer_client import MicroBatch, PackStream, ParallelLayout

JOB, DP, MICRO, STEPS, WINDOW = "test", 3, 2, 8, 3


def test_the_others_go_on_to_the_window_and_are_told_who(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path, staging={"cache_dir": None}, serving={"plan_ahead_steps": WINDOW}
    )
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    own = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    got: list[list[MicroBatch]] = [[] for _ in range(DP)]
    errors: dict[int, BaseException] = {}
    stopped_at = 2
    go_on = threading.Event()

    def read(endpoint: str, rank: int) -> None:
        settings: dict[str, Any] = {"job": JOB, "micro_steps": MICRO, "run_id": "one stops"}
        layout = ParallelLayout.data_parallel(rank, DP)
        with PackStream(
            endpoint, layout=layout, timeout_s=60.0, digests=True, **settings
        ) as stream:
            while len(got[rank]) < STEPS * MICRO:
                if rank == 1 and len(got[rank]) == stopped_at * MICRO:
                    go_on.wait(60)
                if rank != 1 and not go_on.is_set():
                    stream._timeout_s = 2.0
                try:
                    got[rank].append(next(stream))
                    stream._timeout_s = 60.0
                except DeadlineExceeded as error:
                    errors[rank] = error
                    if len(errors) == DP - 1:
                        go_on.set()
                    go_on.wait(60)

    with nothing_leaks(), LocalService(own) as service:
        threads = [
            threading.Thread(target=read, args=(service.endpoint, rank)) for rank in range(DP)
        ]
        for thread in threads:
            thread.start()
        assert go_on.wait(60)
        held = {rank: batches[-1].step for rank, batches in enumerate(got)}
        released = time.monotonic()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        print(f"recovered in {time.monotonic() - released:.1f} s")
    for rank in (0, 2):
        text = str(errors[rank])
        assert f"rank {rank} waited 2 s for step {held[rank] + 1} micro-step 0" in text
        assert f"serving.plan_ahead_steps = {WINDOW}: rank 1 is at step {stopped_at}" in text
        assert "was last heard" in text
        # rank 1 has told at least of the step before the one it has now
        assert stopped_at + WINDOW - 2 <= held[rank] <= stopped_at + WINDOW - 1
    digests = [
        (b.step, pack_id, digest)
        for batches in got
        for b in batches
        for pack_id, digest in zip(b.meta["pack_ids"], b.meta["digests"], strict=True)
    ]
    expected = [
        (d.step, pack_id, digest)
        for d in clean.deliveries
        for pack_id, digest in zip(d.pack_ids, d.digests, strict=True)
    ]
    assert sorted(digests) == sorted(expected)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named(tmp_path: Path) -> None:
    """SIGSTOP of a rank: the others end with an error that names it, none hangs."""
    config = demo_config(tmp_path, serving={"plan_ahead_steps": WINDOW})
    with (
        nothing_leaks(),
        LocalService(config) as service,
        RankProcesses(
            service.endpoint,
            tmp_path / "ranks",
            job=JOB,
            dp_size=DP,
            micro_steps=MICRO,
            steps=STEPS,
            pause_s=0.1,
            timeout_s=5.0,
        ) as ranks,
    ):
        ranks.wait_for_step(2)
        ranks.signal(1, signal.SIGSTOP)
        until = time.monotonic() + 40
        while len(ranks.codes) < DP - 1:
            assert time.monotonic() < until, "a rank hangs"
            time.sleep(0.1)
        assert "rank 1 is at step" in ranks.errors[0] and "DeadlineExceeded" in ranks.errors[0]
        assert "rank 1 is at step" in ranks.errors[2]
        status = service.status()
        assert status["session"]["closed"] == [True, False, True]
