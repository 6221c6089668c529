"""Ten million samples: how soon the first step is there, how soon step 1,000, and in what memory.

The limits are those the service promises on two cores; the figures are printed (`pytest -s`).
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from storage.bigindex import write_big_index

from dataservice.actors.planner import cursor_state
from dataservice.actors.resuming import STATE_VERSION
from dataservice.config import load_config
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.rpc.client import CoordinatorClient
from dataservice.storage.index import Index
from dataservice.wire.messages import (
    GetSteps,
    OpenSession,
    RegisterWorker,
    ResumeState,
    StepCells,
)
from dataservice.wire.states import sealed

ROWS, SHARDS = 10_000_000, 100
FIRST_STEP_S, LATER_STEP_S = 3.0, 1.0
MEMORY_BYTES = 500_000_000
LATER_STEP = 1000
GRIDS = (Grid(dp_size=8, micro_steps=4), Grid(dp_size=64, micro_steps=16))
DECODER = "none"
SERVER = Path(__file__).with_name("coordinator_process.py")


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("big")
    manifest = write_big_index(folder / "index", ROWS, SHARDS)
    settings = {
        "job": "big",
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": [{"name": s.name, "records": f"{s.root}/*.jsonl"} for s in manifest.sources],
        "plan": {"pack_length": 8192, "epochs": 1},
        "serving": {"port": 0, "lease_s": 60.0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    yield path
    for file in (folder / "index").iterdir():
        file.unlink()


@dataclass
class _Served:
    client: CoordinatorClient
    process: psutil.Process
    started: float

    def own_bytes(self) -> dict[str, int]:
        """Memory that is no mapped file, of the coordinator and of its planning process."""
        (planner,) = self.process.children()
        return {"coordinator": _own_bytes(self.process), "planner": _own_bytes(planner)}


@contextmanager
def _coordinator(config_path: Path) -> Iterator[_Served]:
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(config_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        with CoordinatorClient(process.stdout.readline().strip()) as client:
            client.call(
                RegisterWorker(
                    worker_id="w",
                    node="n",
                    endpoint="127.0.0.1:1",
                    decoder=DECODER,
                ),
                10.0,
            )
            yield _Served(client=client, process=psutil.Process(process.pid), started=started)
        process.communicate(timeout=20.0)
    finally:
        process.kill()
        process.communicate()


def _own_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def _open(client: CoordinatorClient, grid: Grid, state: ResumeState | None) -> list[StepCells]:
    """All ranks open a session; returns each rank's cells of its first step."""
    run_id = uuid.uuid4().hex
    for rank in range(grid.dp_size):
        opened = client.call(
            OpenSession(
                job="big",
                run_id=run_id,
                dp_rank=rank,
                dp_size=grid.dp_size,
                micro_steps=grid.micro_steps,
                packs_per_cell=1,
                state=state,
                host="h",
                wait_s=0.0,
            ),
            10.0,
        )
    assert opened.ready
    cells = []
    for rank in range(grid.dp_size):
        steps = client.call(
            GetSteps(
                session=opened.session,
                dp_rank=rank,
                first_step=opened.first_step,
                count=1,
                done_step=opened.first_step,
                done_micro_step=0,
                wait_s=20.0,
                waited_s=0.0,
            ),
            30.0,
        )
        cells += steps.steps
    return cells


def _state(config_path: Path, grid: Grid) -> ResumeState:
    """As a trainer saves it that has read LATER_STEP steps."""
    config = load_config(config_path)
    plan = Plan(config.plan, Index.open(config.index_dir))
    cursor = plan.skip(plan.start(), grid, LATER_STEP)
    return sealed(
        ResumeState(
            version=STATE_VERSION,
            job="big",
            plan_digest=plan.digest,
            decoder=DECODER,
            cursor=cursor_state(plan, cursor, (-1,) * plan.num_lanes),
            micro_step=0,
            dp_size=grid.dp_size,
            micro_steps=grid.micro_steps,
            packs_per_cell=1,
        )
    )


def _check_cells(cells: list[StepCells], grid: Grid, step: int) -> None:
    assert [c.step for c in cells] == [step] * grid.dp_size
    numbers = [place.number for c in cells for cell in c.cells for place in cell]
    first = step * grid.num_packs
    assert sorted(numbers) == list(range(first, first + grid.num_packs))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g.dp_size}x{g.micro_steps}")
def test_first_step_later_step_and_memory(config_path: Path, grid: Grid) -> None:
    state = _state(config_path, grid)

    with _coordinator(config_path) as served:
        opened = time.monotonic()
        cells = _open(served.client, grid, None)
        arrived = time.monotonic()
        _check_cells(cells, grid, 0)
        from_start_s, from_open_s = arrived - served.started, arrived - opened
        memory_first = served.own_bytes()

    # a coordinator that has planned nothing yet: no window of the step is in its memory
    with _coordinator(config_path) as served:
        opened = time.monotonic()
        cells = _open(served.client, grid, state)
        later_s = time.monotonic() - opened
        _check_cells(cells, grid, LATER_STEP)
        memory_later = served.own_bytes()

    print(
        f"\n{ROWS:,} rows, DP {grid.dp_size} x {grid.micro_steps} micro-steps: first step "
        f"{from_start_s:.2f} s after the coordinator's start, {from_open_s:.2f} s after the "
        f"session opened; step {LATER_STEP} {later_s:.2f} s after a session with its cursor opened"
    )
    for memory in (memory_first, memory_later):
        print("above the mapped files:", {k: f"{v / 1e6:.0f} MB" for k, v in memory.items()})
    assert from_start_s < FIRST_STEP_S
    assert from_open_s < FIRST_STEP_S
    assert later_s < LATER_STEP_S
    assert max(sum(memory_first.values()), sum(memory_later.values())) < MEMORY_BYTES
