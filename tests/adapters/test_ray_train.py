"""Ray Train: two workers, a checkpoint of its own, and a second `fit` that goes on from it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainer_examples import CUT, STEPS, arguments, expected_losses, in_one_process, losses

from dataservice.errors import ResumeRefused
from trainer_client import PackStream, ParallelLayout

pytest.importorskip("ray.train", reason="ray[train] is not installed")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short enough for the paths of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
def test_a_run_that_was_cut_gives_what_one_run_gives(endpoint: str, short_folder: Path) -> None:
    expected = expected_losses(endpoint, 4)
    words = arguments("train_ray", endpoint, short_folder)
    runs = [[*words, "--steps", str(steps)] for steps in (CUT, STEPS)]
    output = in_one_process("train_ray", runs, TMPDIR=str(short_folder), RAY_DEDUP_LOGS="0")
    from_rank_0 = "".join(line + "\n" for line in dict.fromkeys(output.splitlines()))
    assert losses(from_rank_0) == pytest.approx(expected, abs=1e-9)


def test_a_checkpoint_without_the_state_is_refused(endpoint: str, tmp_path: Path) -> None:
    from trainer_client.adapters.ray_train import load_state, save_state

    with PackStream(endpoint, job="ray", layout=ParallelLayout(), micro_steps=2) as stream:
        with pytest.raises(ResumeRefused, match=r"pack_stream\.json is missing"):
            load_state(stream, tmp_path)
        save_state(stream, tmp_path)
        load_state(stream, tmp_path)
        assert stream.state_dict() == {}
