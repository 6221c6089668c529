from __future__ import annotations

from pathlib import Path

import pytest
from storage.datasets import ByteCounter, llava, picture, write_jsonl, write_zip

from dataservice.actors.ray_index import ray_executor
from dataservice.errors import StorageError
from dataservice.storage.counting import Counted
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import InThisProcess
from dataservice.storage.records import Record
from dataservice.storage.sources import SourceFiles


class FailingCounter(ByteCounter):
    def count(self, record: Record) -> Counted:
        raise StorageError("cannot be had for now")


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_ray_tasks_build_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}")
    folder = tmp_path / "data"
    write_zip(folder / "all.zip", {f"{n}.png": picture(20 + n, 9) for n in range(8)})
    for shard in range(3):
        records = [llava(f"{n}", f"{n % 8}.png") for n in range(20)]
        write_jsonl(folder / f"{shard}.jsonl", *records, b"bad")
    source = SourceFiles(
        name="s", records=(f"{folder}/*.jsonl",), images=(f"{folder}/all.zip",), take="first:50"
    )
    expected = build_index(
        [source], str(tmp_path / "one"), counter=ByteCounter, executor=InThisProcess()
    )
    index_dir = str(tmp_path / "ray")
    with ray_executor(None, resource="data") as executor:
        for _ in range(2):
            report = build_index([source], index_dir, counter=ByteCounter, executor=executor)
            assert report.digest == expected.digest
        assert report.sources[0].shards_reused == 3
        write_jsonl(folder / "1.jsonl", {"text": "new"})
        with pytest.raises(StorageError, match="cannot be had for now"):
            build_index([source], index_dir, counter=FailingCounter, executor=executor)
