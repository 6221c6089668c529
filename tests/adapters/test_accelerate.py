"""Accelerate: two processes, each on its own stream, then one that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trainer_examples import (
    CUT,
    STEPS,
    arguments,
    expected_losses,
    in_this_process,
    launched,
    losses,
)

pytest.importorskip("accelerate", reason="accelerate is not installed")


def test_two_ranks_then_one_give_what_one_run_gives(endpoint: str, tmp_path: Path) -> None:
    expected = expected_losses(endpoint, 4)
    first = launched("train_accelerate", endpoint, tmp_path, "--steps", str(CUT))
    words = arguments("train_accelerate", endpoint, tmp_path)
    second = in_this_process(
        "train_accelerate", [[*words, "--steps", str(STEPS), "--micro-steps", "4"]]
    )
    assert losses(first + second) == pytest.approx(expected, abs=1e-9)
