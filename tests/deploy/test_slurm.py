"""deploy/slurm's batch scripts on a real Slurm of this computer, with programs that only say what
they are told in place of Ray, service and trainer (test_slurm_training.py has the real ones)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import Slurm, batch_script, lacks, processes_with
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=1000"
GPU = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=1000 --gpus-per-node=1"
ALL_CORES = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --mem=4000 --gpus-per-node=1"
END_S = 40.0

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=lacks()),
    pytest.mark.timeout(180),
]


@pytest.fixture(autouse=True)
def _no_job_left(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.cancel_all()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("cluster") / "slurm", "cpu1", "cpu2", "gpu1", "gpu2") as it:
        yield it


class Job:
    """A batch job of `script` with the resources `sizes`, in a folder of its own."""

    def __init__(
        self, slurm: Slurm, folder: Path, script: str, *sizes: str, config: str = "c.yaml"
    ):
        self.slurm, self.folder = slurm, folder
        self.told_file = folder / "told"
        self.told_file.touch()
        self.run = folder / "run"
        programs = ROOT / "tests" / "support" / "slurm_programs"
        env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "DATASERVICE_DEPLOY": str(ROOT / "deploy"),
            "DATASERVICE_RUN": str(self.run),
            "SERVICE_CPUS": "1",
            "SERVICE_MEM": "1000M",
            "TOLD": str(self.told_file),
            "KILL": str(folder / "kill"),
            "DONE": str(folder / "done"),
        }
        batch = batch_script(ROOT / "deploy" / "slurm" / script, folder, *sizes)
        arguments = [config] if script != "train.sbatch" else []
        if script != "service.sbatch":
            arguments += ["train.py", "--lr", "1"]
        self.number = slurm.submit(str(batch), *arguments, cwd=folder, env=env)

    def told(self) -> list[str]:
        return self.told_file.read_text().splitlines()

    def output(self) -> str:
        return (self.folder / f"slurm-{self.number}.out").read_text()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        def seen() -> bool:
            return len(re.findall(pattern, "\n".join(self.told()), re.MULTILINE)) >= times

        until(f"{times} x {pattern} in {self.folder}", seen, END_S)

    def wait(self) -> list[str]:
        states = self.slurm.wait(self.number, END_S + 60)
        until("every process of the job gone", lambda: not processes_with(str(self.told_file)), 10)
        return states

    def kill(self, what: str) -> None:
        (self.folder / f"kill-{what}").touch()


def test_a_heterogeneous_job_serves_on_cpu_nodes_until_the_trainer_is_done(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "cpu_nodes.sbatch", SMALL, GPU)
    job.wait_for("trainer: cores", times=2)
    (tmp_path / "done").touch()
    assert job.wait() == ["COMPLETED", "COMPLETED"], job.output()
    told = job.told()
    serving = next(line for line in told if "serve: serve" in line)
    assert re.fullmatch(
        r"cpu1 serve: serve \S+/c.yaml --address cpu1:6379 --host 0.0.0.0", serving
    ), serving
    assert {line.split()[0] for line in told if "trainer: cores" in line} == {"gpu1", "gpu2"}
    for rank, node in enumerate(("gpu1", "gpu2")):
        (line,) = [line for line in told if line.startswith(f"{node} trainer: cores")]
        assert f"--nnodes=2 --node-rank={rank} --nproc-per-node=1 --master-addr=gpu1" in line
        assert line.endswith("train.py --lr 1 --endpoint cpu1:7070")
    # In order: the service, then Ray of its node.
    ends = [line for line in told if line.endswith(": end")]
    assert ends[:2] == ["cpu1 serve: end", "cpu1 ray: end"]
    assert ends[2:] == ["cpu2 ray: end"]
    again = Job(slurm, tmp_path, "cpu_nodes.sbatch", SMALL, GPU)  # in the same folder
    assert again.wait() == ["COMPLETED", "COMPLETED"], again.output()


def test_secrets_are_the_users_alone_and_a_run_has_its_own(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "service.sbatch", SMALL)
    job.wait_for("serve: serve")
    assert job.run.stat().st_mode & 0o777 == 0o700
    for name in ("token", "ray.token", "tls.key"):
        assert (job.run / name).stat().st_mode & 0o077 == 0
        assert len((job.run / name).read_text()) > 60
    assert (job.run / "token").read_text() != (job.run / "ray.token").read_text()
    slurm.call("scancel", str(job.number))
    assert job.wait() == ["CANCELLED"]


def test_a_cancelled_job_leaves_no_process_and_the_next_one_no_folder(
    slurm: Slurm, tmp_path: Path
) -> None:
    folders = {}
    before = set(Path("/tmp").glob("ray-node.*"))  # of another cluster, perhaps
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        job = Job(slurm, folder, "cpu_nodes.sbatch", SMALL, GPU)
        job.wait_for("trainer: cores", times=2)
        folders[name] = set(Path("/tmp").glob("ray-node.*")) - before
        slurm.call("scancel", str(job.number))  # srun then kills at once what it runs
        assert job.wait() == ["CANCELLED", "CANCELLED"]
    assert len(folders["first"]) >= 2
    assert not folders["first"] & folders["second"]


def test_sigterm_to_a_heterogeneous_job_ends_trainer_then_service(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "cpu_nodes.sbatch", SMALL, GPU)
    job.wait_for("trainer: cores", times=2)
    slurm.call("scancel", "--batch", "--signal=TERM", str(job.number))
    assert job.wait() == ["FAILED", "FAILED"], job.output()
    ends = [line.split(" ", 1)[1] for line in job.told() if line.endswith(": end")]
    assert ends == ["trainer: end", "trainer: end", "serve: end", "ray: end", "ray: end"]


def test_sigterm_to_the_batch_script_ends_trainer_then_service(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "gpu_nodes.sbatch", ALL_CORES)
    job.wait_for("trainer: cores", times=2)
    cores = dict(re.findall(r"(\w+ (?:ray|trainer)): cores (\d+)", "\n".join(job.told())))
    for node in ("cpu1", "cpu2"):
        assert {cores[f"{node} ray"], cores[f"{node} trainer"]} == {"0", "1"}
    slurm.call("scancel", "--batch", "--signal=TERM", str(job.number))
    assert job.wait() == ["FAILED"], job.output()
    ends = [line.split(" ", 1)[1] for line in job.told() if line.endswith(": end")]
    assert ends == ["trainer: end", "trainer: end", "serve: end", "ray: end", "ray: end"]
    assert "SIGTERM: stopping" in job.output()


@pytest.mark.clusters
def test_a_service_or_trainer_that_ends_is_started_again_beside_the_other(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "cpu_nodes.sbatch", SMALL, GPU)
    job.wait_for("trainer: cores", times=2)
    job.kill("service")
    job.wait_for("serve: serve", times=2)
    again = [line for line in job.told() if "serve: serve" in line][-1]
    assert again.endswith("--port 7070")  # where trainers look for it
    until("an endpoint again", (job.run / "endpoint").exists, END_S)
    job.kill("trainer")
    job.wait_for("trainer: cores", times=4)
    time.sleep(1)
    (tmp_path / "done").touch()
    assert job.wait() == ["COMPLETED", "COMPLETED"], job.output()
    assert sum("trainer: end" in line for line in job.told()) <= 1
    assert "it is started again from its checkpoint" in job.output()


@pytest.mark.clusters
def test_a_node_whose_ray_ends_joins_again(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "service.sbatch", SMALL)
    job.wait_for("ray: cores", times=2)
    job.wait_for("serve: serve")
    job.kill("ray-cpu2")
    job.wait_for("cpu2 ray: cores", times=2)
    slurm.call("scancel", "--batch", "--signal=TERM", str(job.number))
    assert job.wait() == ["FAILED"]
    assert sum("serve: serve" in line for line in job.told()) == 1


def test_a_service_that_cannot_start_ends_the_job_and_says_why(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "cpu_nodes.sbatch", SMALL, GPU, config="wrong.yaml")
    assert job.wait() == ["FAILED", "FAILED"], job.output()
    assert "wrong.yaml: zzz: unknown key" in job.output()
    assert not any("trainer" in line for line in job.told())
    assert sum("serve: serve" in line for line in job.told()) == 1


@pytest.mark.clusters
def test_two_jobs_find_each_other_and_a_requeued_service_is_found_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    service = Job(slurm, tmp_path / "one", "service.sbatch", SMALL)
    service.wait_for("serve: serve")
    until("an endpoint", (service.run / "endpoint").exists, END_S)
    os.symlink(service.run, tmp_path / "two" / "run")
    trainer = Job(slurm, tmp_path / "two", "train.sbatch", GPU)
    trainer.wait_for("trainer: cores", times=2)
    slurm.call("scontrol", "requeue", str(service.number))
    until("it queued", lambda: slurm.job_states(service.number) == ["PENDING"], END_S)
    slurm.call("scontrol", "update", f"JobId={service.number}", "StartTime=now")
    service.wait_for("serve: serve", times=2)
    until("an endpoint again", (service.run / "endpoint").exists, END_S)
    (tmp_path / "two" / "done").touch()
    assert trainer.wait() == ["COMPLETED"], trainer.output()
    slurm.call("scancel", str(service.number))
    assert service.wait() == ["CANCELLED"]
