"""A real Slurm cluster on this computer: munged, slurmctld and a slurmd on each of its machines.

Invariants: it is gone at the end of the block, with all jobs; files are in the caller's folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support import machines
from tests.support.machines import Machines
from tests.support.until import until

CONTROL = "control"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
START_S = 60.0
GPUS = 1
"""That a node is said to have; there is nothing behind them."""

CONF = """\
ClusterName=packs
SlurmctldHost={control}({control_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobRequeue=1
GresTypes=gpu
KillWait=30
MinJobAge=3600
"""


def lacks() -> str:
    """Why there is no Slurm here; "" where there is."""
    if os.getuid() != 0:
        return "only root starts a Slurm of its own"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"the program `{program}` is not installed (deploy/install_slurm.sh)"
    return machines.lacks()


def batch_script(script: Path, folder: Path, *sizes: str) -> Path:
    """`script` as a user edits it: with `sizes` for its lines of resources, in this order."""
    lines = script.read_text().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.startswith("#SBATCH --nodes")]
    assert len(places) == len(sizes)
    for place, size in zip(places, sizes, strict=True):
        lines[place] = f"#SBATCH {size}\n"
    edited = folder / script.name
    edited.write_text("".join(lines))
    return edited


def processes_with(text: str, *, command: str = "") -> list[int]:
    """Whose environment contains `text` and whose words match the expression `command`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text.encode() in (path / "environ").read_bytes() and re.search(command, words):
                found.append(int(path.name))
        except OSError:
            continue
    return found


class Slurm:
    """`nodes` name its machines, each with all of this computer's cores; `memory_mb` each."""

    def __init__(self, folder: Path, *nodes: str, memory_mb: int = 6000) -> None:
        self.folder = folder
        self.nodes = nodes
        self.machines = Machines(CONTROL, *nodes)
        self._memory_mb = memory_mb
        self._env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._stack = ExitStack()

    def __enter__(self) -> Slurm:
        with ExitStack() as stack:
            self.folder.mkdir(parents=True)
            (self.folder / "state").mkdir()
            stack.enter_context(self.machines)
            self._write_files()
            self._start_munged(stack)
            self._start(CONTROL, "slurmctld", "-D")
            for node in self.nodes:
                (self.folder / f"spool-{node}").mkdir()
                self._start(node, "slurmd", "-D", "-N", node)
            until("all nodes of Slurm idle", self._all_idle, START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, *command: str, **options: Any) -> str:
        """Standard output of a Slurm command, on the machine of slurmctld."""
        given = {"env": self._env, "text": True, "capture_output": True, **options}
        result = self.machines.run(CONTROL, command, **given)
        if result.returncode:
            raise AssertionError(f"{command}: {result.returncode}: {result.stdout}{result.stderr}")
        return str(result.stdout)

    def submit(self, *arguments: str, cwd: Path, env: dict[str, str]) -> int:
        """The number of the batch job."""
        out = self.call("sbatch", "--parsable", *arguments, cwd=cwd, env=self._env | env)
        return int(out.split(";")[0])

    def job_states(self, job: int) -> list[str]:
        """Of the job, or of each component where it is heterogeneous; [] once it is forgotten."""
        lines = self.call("squeue", "--all", "-h", "-t", "all", "-j", str(job), "-o", "%T")
        return lines.split()

    def wait(self, job: int, timeout_s: float) -> list[str]:
        """States in which the job ended, by component."""
        end = time.monotonic() + timeout_s
        while True:
            states = self.job_states(job)
            if not set(states) & {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STOPPED"}:
                return states
            if time.monotonic() > end:
                raise AssertionError(f"job {job} is {states} after {timeout_s:g} s")
            time.sleep(0.3)

    def cancel_all(self) -> None:
        """Returns once the nodes are idle again."""
        self.call("scancel", "--user=root", "--quiet")
        until("all nodes of Slurm idle", self._all_idle, START_S)

    def logs(self) -> str:
        return "".join(
            f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _all_idle(self) -> bool:
        states = self.call("sinfo", "-h", "-N", "-o", "%N %T").split("\n")
        return sorted(states[:-1]) == sorted(f"{node} idle" for node in self.nodes)

    def _start(self, machine: str, *command: str) -> None:
        with (self.folder / f"{command[0]}-{machine}.log").open("wb") as log:
            self.machines.start(machine, command, log=log, env=self._env)

    def _write_files(self) -> None:
        address = self.machines.address
        conf = CONF.format(
            control=CONTROL, control_address=address[CONTROL], folder=self.folder.resolve()
        )
        cores = len(os.sched_getaffinity(0))
        for node in self.nodes:
            conf += (
                f"NodeName={node} NodeAddr={address[node]} CPUs={cores} "
                f"RealMemory={self._memory_mb} Gres=gpu:{GPUS}\n"
            )
        conf += f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE\n"
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu Count={GPUS} File=/dev/null\n")
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _start_munged(self, stack: ExitStack) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {
            name: self.folder / f"munge.{name}"
            for name in ("socket", "log-file", "pid-file", "seed-file")
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        command = ["munged", "--force", "--foreground", f"--key-file={key}", *options]
        with (self.folder / "munged.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(_end, process)
        until("munged's socket", files["socket"].exists, START_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(START_S)
