from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from storage.recordbytes import MemoryStore

from dataservice.storage.recordfiles import RecordScan

FAR = 2**62


def records(**columns: Any) -> list[Any]:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    data = file.getvalue()
    scan = RecordScan(MemoryStore({"a.parquet": data}), "a.parquet", len(data), deadline_s=9)
    return [line.data and json.loads(line.data) for batch in scan.batches() for line in batch]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([FAR], pa.timestamp("us")),
        pa.array([1], pa.timestamp("ns")),
        pa.array([FAR], pa.timestamp("ms", tz="UTC")),
        pa.array([2**31 - 1], pa.date32()),
        pa.array([1], pa.time64("ns")),
        pa.array([FAR], pa.duration("us")),
    ],
    ids=lambda values: str(values.type),
)
def test_dates_and_times_that_python_lacks_do_not_cost_the_record(values: Any) -> None:
    """By themselves, and in what a layout reads."""
    (number,) = values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64()).to_pylist()
    assert records(text=["hi"], when=values) == [{"text": "hi", "when": number}]
    turn = pa.StructArray.from_arrays([pa.array(["hi"]), values], ["content", "when"])
    turns = pa.ListArray.from_arrays([0, 1], turn)
    assert records(messages=turns) == [{"messages": [{"content": "hi", "when": number}]}]


def test_other_types_that_json_lacks() -> None:
    (record,) = records(
        text=["hi"],
        decimal=pa.array([1], pa.decimal128(38, 2)),
        pairs=pa.array([[(1, 2), (1, 3)]], pa.map_(pa.int64(), pa.int32())),
        half=pa.array([float("inf")], pa.float16()),
        large=pa.array([2**64 - 1], pa.uint64()),
    )
    assert record["text"] == "hi" and record["large"] == 2**64 - 1
    assert record["pairs"] == [[1, 2], [1, 3]] and record["half"] is None
