"""One sentence that says whether a rank waits, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from dataservice.obs.verdict import verdict_of


def worker(**figures: Any) -> dict[str, Any]:
    return {
        "draining": False,
        "ready_packs": 3,
        "ready_bytes": 3_000_000,
        "busy_share": 0.3,
        "read_staged_bytes": 100,
        "read_origin_bytes": 0,
        "stuck_reads": 0,
    } | figures


def status(shares: list[float], for_workers: list[float] | None = None, **more: Any) -> Any:
    session = {
        "failure": "",
        "closed": [False] * len(shares),
        "done": [[7, 0]] * len(shares),
        "done_step": 7,
        "end_step": -1,
        "open_for_s": 500.0,
        "heard_s_ago": [1.0] * len(shares),
        "waited_share": shares,
        "waited_workers_share": shares if for_workers is None else for_workers,
    } | more.pop("session", {})
    return {"state": "serving", "session": session, "workers": [worker()], "stagers": []} | more


def said(of: Any) -> tuple[str, str]:
    verdict = verdict_of(of)
    return verdict["level"], verdict["text"]


def test_before_and_after_a_run() -> None:
    assert said({"state": "opening", "job": "j"}) == ("idle", "The service is opening its index")
    assert said(status([]) | {"session": None}) == ("idle", "No trainer has come yet")
    opening = {"dp_size": 16, "missing_ranks": [3, 5], "waiting_for": ""}
    come = status([]) | {"session": None, "opening": opening}
    assert said(come) == ("idle", "The run waits for 2 of 16 ranks to come")
    assert verdict_of(come)["why"] == "Missing: 3, 5."
    opening |= {"missing_ranks": [], "waiting_for": "no worker is alive"}
    assert said(come) == ("idle", "The run is opening")
    assert verdict_of(come)["why"] == "no worker is alive"
    failed = status([0.0], session={"failure": "too many holes"})
    assert said(failed) == ("error", "The run has failed")
    assert verdict_of(failed)["why"] == "too many holes"
    over = status([0.9], session={"closed": [True], "end_step": 7})
    assert said(over) == ("idle", "The run is over")
    assert said(status([0.9], session={"closed": [True]}))[1] == "Every rank has closed its stream"


def test_nobody_waits() -> None:
    assert said(status([0.0, 0.019])) == ("ok", "No rank is waiting")
    assert verdict_of(status([0.0]))["why"] == "3 packs (3 MB) are ready on 1 worker."
    silent = status([0.0, 0.0], session={"heard_s_ago": [40.0, 90.0]})
    assert said(silent) == ("warning", "No rank reports")
    assert "rank 1 for 90 s" in verdict_of(silent)["why"]


@pytest.mark.parametrize(
    ("workers", "stagers", "cause"),
    [
        ([worker(busy_share=0.97)], [], "decode is the bottleneck"),
        ([worker(busy_share=0.2)], [], "packs are ready but come slowly"),
        ([worker(busy_share=0.2, ready_packs=0)], [], "reading is the bottleneck"),
        ([worker(stuck_reads=2)], [], "reads hang"),
        (
            [worker(read_origin_bytes=900, busy_share=0.97)],
            [{"missing_bytes": 5}],
            "staging is behind",
        ),
        (
            [worker(read_origin_bytes=900, busy_share=0.97)],
            [{"missing_bytes": 0}],
            "decode is the bottleneck",
        ),
    ],
)
def test_waits_for_workers_name_the_bottleneck(workers: Any, stagers: Any, cause: str) -> None:
    found = status([0.11, 0.12], workers=workers, stagers=stagers)
    assert said(found) == ("warning", f"Ranks wait up to 12 % of their time for workers: {cause}")


def test_some_ranks_wait() -> None:
    one = status([0.0, 0.0, 0.4])
    level, text = said(one)
    assert (level, text.partition(" for workers")[0]) == ("error", "Rank 2 waits 40 % of its time")
    assert "meet it in a collective" in verdict_of(one)["why"]
    assert said(status([0.05, 0.0, 0.4, 0.1]))[1].startswith("Rank 2 waits 40 % of its time")
    assert "meet them in a collective" in verdict_of(status([0.05, 0.0, 0.04]))["why"]
    assert said(status([0.05, 0.0, 0.04]))[1].startswith("2 of 3 ranks wait up to 5 % of their")


def test_waits_that_are_not_for_workers() -> None:
    others = [0.0, 0.0, 0.0]
    behind = {"done": [[9, 0], [4, 1], [9, 2]], "heard_s_ago": [1.0, 12.2, 1.0]}
    found = status([0.5, 0.0, 0.5], others, session=behind)
    assert said(found) == ("warning", "All wait for rank 1")
    assert "step 4 micro-step 1" in verdict_of(found)["why"]
    assert "12 s ago" in verdict_of(found)["why"]
    assert said(status([0.5] * 3, others))[1].endswith("for steps to be handed out")
    waits = status([0.5] * 3, others, planning_waits="No space left on device")
    assert said(waits) == ("error", "Ranks wait up to 50 % of their time for the plan")
    begun = status([0.5] * 3, others, session={"open_for_s": 10.0})
    assert said(begun) == ("idle", "The run has just begun, or gone on")


def test_no_worker_is_the_first_thing_to_say() -> None:
    found = status([0.9], workers=[], workers_without_room=4)
    assert said(found) == ("error", "Every rank waits: no worker is alive")
    assert verdict_of(found)["why"] == "Ray has no room for 4 of them."


def test_workers_that_all_drain_are_no_matter_of_storage() -> None:
    drained = [worker(draining=True, ready_packs=0)] * 2
    verdict = verdict_of(status([0.5, 0.5], workers=drained))
    assert verdict["text"].endswith("for workers: no worker takes new packs")
    assert "All 2 workers that there are drain" in verdict["why"]


def test_a_rank_that_others_wait_for_may_have_closed_its_stream() -> None:
    session = {"closed": [False, True], "done": [[9, 0], [4, 0]]}
    verdict = verdict_of(status([0.9, 0.0], [0.0, 0.0], session=session))
    assert verdict["text"] == "All wait for rank 1"
    assert verdict["why"].endswith("and has closed its stream.")
