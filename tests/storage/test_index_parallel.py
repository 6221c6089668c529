from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip

from dataservice.errors import StorageError
from dataservice.storage.counting import Counted
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import AsItFits, InProcesses, InThisProcess
from dataservice.storage.index_report import IndexProgress, IndexReport
from dataservice.storage.index_shard import ShardResult
from dataservice.storage.index_tasks import BuildContext, Done, ShardTask
from dataservice.storage.records import Record
from dataservice.storage.sources import SourceFiles

SHARDS = 5


class DeadlyCounter(ByteCounter):
    """Ends its process at a text that says so."""

    def count(self, record: Record) -> Counted:
        if record.turns[0].pieces == ("die",):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().count(record)


class SlowCounter(ByteCounter):
    def count(self, record: Record) -> Counted:
        time.sleep(0.002)
        return super().count(record)


def builders() -> list[psutil.Process]:
    """Processes that this one started to build with."""
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def data(folder: Path) -> SourceFiles:
    write_zip(folder / "all.zip", {f"{n}.png": picture(20 + n, 9) for n in range(8)})
    for shard in range(SHARDS):
        write_zip(folder / f"{shard}.zip", {"0.png": picture(50 + shard, 9)})
        records = [llava(f"{n}", f"{n % 8}.png") for n in range(300)]
        write_jsonl(folder / f"{shard}.jsonl", *records, b"bad", {"text": "x"})
    return SourceFiles(name="s", records=(f"{folder}/*.jsonl",), images=(f"{folder}/all.zip",))


def test_processes_build_the_same_index(tmp_path: Path) -> None:
    source = data(tmp_path / "data")
    reports: list[IndexReport] = []
    seen: list[IndexProgress] = []
    for name, executor in (("one", InThisProcess()), ("two", InProcesses(2)), ("auto", AsItFits())):
        index_dir = str(tmp_path / name)
        reports.append(
            build_index(
                [source], index_dir, counter=ByteCounter, executor=executor, progress=seen.append
            )
        )
        last = seen[-1]
        assert (last.done_bytes, last.num_samples) == (last.total_bytes, 302 * SHARDS)
    assert len({report.digest for report in reports}) == 1
    one, two, _ = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        for name in ("one", "two", "auto")
    )
    assert one == two
    assert not builders()


def test_a_file_that_cannot_be_read_ends_it_and_the_rest_is_kept(tmp_path: Path) -> None:
    source = data(tmp_path / "data")
    index_dir = str(tmp_path / "index")
    write_jsonl(tmp_path / "data/2.jsonl", {"text": "die"})
    with pytest.raises(StorageError, match=r"ended by a signal .*jsonl"):
        build_index([source], index_dir, counter=DeadlyCounter, executor=InProcesses(2))
    assert not builders()
    write_jsonl(tmp_path / "data/2.jsonl", {"text": "fine"})
    report = build_index([source], index_dir, counter=DeadlyCounter, executor=InProcesses(1))
    assert report.sources[0].shards_read + report.sources[0].shards_reused == SHARDS
    os.unlink(tmp_path / "data/2.jsonl")
    os.mkdir(tmp_path / "data/2.jsonl")
    broken = SourceFiles(name="s", records=(f"{tmp_path}/data/2.jsonl/../?.jsonl",))
    assert build_index([broken], index_dir, counter=ByteCounter).num_samples == 302 * 4


def test_a_killed_build_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    source = data(tmp_path / "data")
    index_dir = tmp_path / "index"
    script = tmp_path / "build.py"
    script.write_text(
        "from storage.test_index_parallel import InProcesses, SlowCounter, SourceFiles\n"
        "from dataservice.storage.index_build import build_index\n"
        "from dataservice.storage.sources import RecordFormat\n"
        "if __name__ == '__main__':\n"
        f"    build_index([{source!r}], {str(index_dir)!r}, counter=SlowCounter,"
        " executor=InProcesses(2))\n"
    )
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    process = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": paths})
    ends = time.monotonic() + 60
    while not list(index_dir.glob("shard-*.json")) and time.monotonic() < ends:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert children and not alive
    report = build_index([source], str(index_dir), counter=SlowCounter)
    assert 0 < report.sources[0].shards_reused < SHARDS
    assert not [name for name in os.listdir(index_dir) if name.startswith((".tmp", ".building"))]


def test_tasks_say_how_far_they_are(tmp_path: Path) -> None:
    seen: list[IndexProgress] = []
    write_jsonl(tmp_path / "data/a.jsonl", *({"text": f"{n}"} for n in range(900)))
    write_jsonl(tmp_path / "data/b.jsonl", {"text": "x"})
    build_index(
        [SourceFiles(name="s", records=(f"{tmp_path}/data/*.jsonl",))],
        str(tmp_path / "index"),
        counter=SlowCounter,
        executor=InProcesses(2),
        progress=seen.append,
    )
    between = [state for state in seen if 1 < state.num_samples < 900]
    assert between and all(0 < state.done_bytes < state.total_bytes for state in between)


def test_an_executor_of_another_kind(tmp_path: Path) -> None:
    """As Ray's: it does tasks where it likes and gives results in any order."""
    source = data(tmp_path / "data")

    class Backwards:
        def run(self, context: BuildContext, tasks):  # type: ignore[no-untyped-def]
            states = list(InThisProcess().run(context, tasks))
            shards = [t for t in tasks if isinstance(t, ShardTask)]
            done = [s for s in states if isinstance(s, Done)]
            assert len(done) == len(tasks)
            assert all(isinstance(s.result, ShardResult) for s in done) or not shards
            yield from reversed(done)

    one = build_index([source], str(tmp_path / "1"), counter=ByteCounter, executor=Backwards())
    two = build_index([source], str(tmp_path / "2"), counter=ByteCounter)
    assert one.digest == two.digest
