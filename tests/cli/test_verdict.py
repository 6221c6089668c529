from __future__ import annotations

from typing import Any

import pytest
from support.fake_coordinator import report, session, worker

from dataservice.cli.verdict import verdict

BUSY = {"waited_share": 0.3, "busy_share": 0.9}


@pytest.mark.parametrize(
    ("parts", "shares", "level", "words"),
    [
        ({"state": "opening"}, [], "idle", "The service is opening its index."),
        ({"session": None}, [], "idle", "No trainer has connected yet."),
        (
            {"session": None, "workers": []},
            [],
            "idle",
            "No trainer has connected yet. No worker is alive.",
        ),
        ({"session": session(2, failure="bad")}, [], "bad", "The run has failed: bad"),
        ({"winding_down": True}, [0.5], "idle", "The service drains: no more steps"),
        ({"session": session(2, closed=[True] * 2)}, [0.9, 0.9], "idle", "Every rank has closed"),
        ({}, [], "good", "Looking for ranks that wait."),
        ({}, [0.0, 0.02], "good", "No rank is waiting."),
        (
            {"scaling": BUSY},
            [0.0, 0.3],
            "waits",
            "Rank 1 waits 30% of its time (for workers): decoding is the bottleneck.",
        ),
        (
            {"scaling": BUSY},
            [0.1, 0.3, 0.0],
            "waits",
            "2 ranks wait, the longest 30% (for workers): decoding is the bottleneck.",
        ),
        (
            {"scaling": BUSY | {"busy_share": 0.1}},
            [0.3],
            "waits",
            "Rank 0 waits 30% of its time (for workers): they are not busy, so reading is slow.",
        ),
        (
            {"scaling": BUSY, "workers": [worker("w0", queued_packs=0)]},
            [0.3],
            "waits",
            "Rank 0 waits 30% of its time (for workers): but they have nothing left to build.",
        ),
        (
            {"scaling": BUSY, "workers": [worker("w0", stuck_reads=1)]},
            [0.3],
            "waits",
            "Rank 0 waits 30% of its time (for workers): storage does not answer.",
        ),
        ({"workers": []}, [0.3], "waits", "Rank 0 waits 30% of its time: no worker is alive."),
        (
            {"session": session(3, done=[[9, 0], [9, 0], [2, 1]], heard_s_ago=[0, 0, 45.0])},
            [0.6, 0.5, 0.0],
            "waits",
            "2 ranks wait, the longest 60%, for rank 2, which is behind all others and was last "
            "heard 45 s ago.",
        ),
        # who is behind and waits itself is not who the others wait for
        (
            {"session": session(2, done=[[9, 0], [2, 1]])},
            [0.6, 0.5],
            "waits",
            "2 ranks wait, the longest 60% for steps",
        ),
        (
            {"counting": {"waiting_for": "block 3 of a.jsonl"}},
            [0.6, 0.5, 0, 0],
            "waits",
            "2 ranks wait, the longest 60% (for the plan): block 3 of a.jsonl.",
        ),
    ],
)
def test_says_who_waits_and_for_whom(
    parts: dict[str, Any], shares: list[float], level: str, words: str
) -> None:
    found = verdict(report(**parts), shares)
    assert (found.level, found.words[: len(words)]) == (level, words)
