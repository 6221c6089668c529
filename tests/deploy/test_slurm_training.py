"""The batch scripts of deploy/slurm with everything real: Slurm, Ray, the service, torchrun and the
example's model on the small corpus."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pytest
import yaml

from tests.support.slurm import Slurm, batch_script, lacks, processes_with
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "deploy" / "slurm" / "serving.yaml"
DEMO = ROOT / "deploy" / "demo.yaml"
SERVICE = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=3000"
TRAINER = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=2000 --gpus-per-node=1"
BOTH = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --mem=5000 --gpus-per-node=1"
DONE_S = 400.0
STEPS = 12

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.ray,
    pytest.mark.skipif(bool(lacks()), reason=lacks()),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("cluster") / "slurm", "cpu1", "cpu2", "gpu1", "gpu2") as it:
        yield it


@pytest.fixture(autouse=True)
def _no_job_left(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.cancel_all()


def secured(folder: Path) -> Path:
    """The demo's config, with TLS and the token of each run."""
    config = yaml.safe_load(DEMO.read_text())
    for source in config["sources"]:
        for name in source.keys() - {"name"}:
            source[name] = str((DEMO.parent / source[name]).resolve())
    config["serving"] = yaml.safe_load(SERVING.read_text())["serving"]
    path = folder / "secured.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def submit(
    slurm: Slurm,
    folder: Path,
    script: str,
    *sizes: str,
    trainer: tuple[str, ...],
    secure: bool = True,
) -> int:
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DEMO_DIR": str(folder),
        "DATASERVICE_DEPLOY": str(ROOT / "deploy"),
        "DATASERVICE_RUN": str(folder / "run"),
        "DATASERVICE_INSECURE": "0" if secure else "1",
        "SERVICE_CPUS": "1",
        "SERVICE_MEM": "2500M",
        "OMP_NUM_THREADS": "1",
    }
    batch = batch_script(ROOT / "deploy" / "slurm" / script, folder, *sizes)
    config = secured(folder) if secure else DEMO
    return slurm.submit(str(batch), str(config), *trainer, cwd=folder, env=env)


def example(folder: Path, num_steps: int) -> tuple[str, ...]:
    return (
        *("-m", "trainer_client.examples.train_tiny_vlm", "--job", "demo", "--micro-steps", "4"),
        *("--checkpoint", str(folder / "checkpoint.pt"), "--checkpoint-every", "3"),
        *("--steps", str(num_steps)),
    )


def steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+) loss", output, re.MULTILINE)]


def all_of(folder: Path, number: int) -> str:
    """What the job and its parts wrote, for the message of an assertion."""
    logs = sorted((folder / "run").rglob("*.log"))
    texts = [path.read_text(errors="replace")[-3000:] for path in logs]
    return "\n".join([(folder / f"slurm-{number}.out").read_text()[-6000:], *texts])


def assert_nothing_left(folder: Path) -> None:
    until("every process of the job gone", lambda: not processes_with(str(folder / "run")), 20)
    assert not list(Path("/tmp").glob("ray-node.*"))


@pytest.mark.parametrize(
    ("script", "sizes", "secure"),
    [
        ("cpu_nodes.sbatch", (SERVICE, TRAINER), True),
        ("gpu_nodes.sbatch", (BOTH,), False),
    ],
)
def test_a_trainer_gets_to_its_last_step_and_nothing_stays(
    slurm: Slurm, tmp_path: Path, script: str, sizes: tuple[str, ...], secure: bool
) -> None:
    trainer = example(tmp_path, STEPS)
    number = submit(slurm, tmp_path, script, *sizes, trainer=trainer, secure=secure)
    states = slurm.wait(number, DONE_S)
    text = all_of(tmp_path, number)
    assert set(states) == {"COMPLETED"}, text
    done = steps(text)
    assert done == list(range(STEPS)), text
    assert {path.stem for path in (tmp_path / "run" / "log").glob("*.log")} == {
        "cpu1",
        "cpu2",
    }
    assert_nothing_left(tmp_path)


def test_a_killed_service_comes_again_and_a_stopped_run_goes_on_from_its_checkpoint(
    slurm: Slurm, tmp_path: Path
) -> None:
    trainer = example(tmp_path, 1000)
    number = submit(slurm, tmp_path, "cpu_nodes.sbatch", SERVICE, TRAINER, trainer=trainer)
    out = tmp_path / f"slurm-{number}.out"
    until("three steps", lambda: out.exists() and len(steps(out.read_text())) >= 3, DONE_S)
    os.kill(max(processes_with(str(tmp_path / "run"), command=r"dataservice serve")), SIGKILL)
    before = len(steps(out.read_text()))
    # of what was fetched ahead and what comes from the service that takes its place
    until("steps beyond the kill", lambda: len(steps(out.read_text())) > before + 12, DONE_S)
    assert "it is started again" in out.read_text()
    slurm.call("scancel", "--batch", "--signal=TERM", str(number))
    slurm.wait(number, 150)
    assert_nothing_left(tmp_path)
    done = steps(out.read_text())
    assert done == list(range(len(done))), all_of(tmp_path, number)

    trainer = example(tmp_path, done[-1] + 3)
    again = submit(slurm, tmp_path, "cpu_nodes.sbatch", SERVICE, TRAINER, trainer=trainer)
    assert set(slurm.wait(again, DONE_S)) == {"COMPLETED"}, all_of(tmp_path, again)
    went_on = steps((tmp_path / f"slurm-{again}.out").read_text())
    first = (done[-1] + 1) // 3 * 3  # that the last checkpoint leaves to do
    assert went_on == list(range(first, done[-1] + 3))
