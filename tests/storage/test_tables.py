from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.errors import StaleIndexError
from dataservice.storage.spool import Spool, joined
from dataservice.storage.tables import Line, Stored, Table, Wide, write_table

COLUMN = st.one_of(
    st.builds(lambda base, step, n: [base + step * i for i in range(n)],
              st.integers(0, 2**62), st.integers(-3, 9), st.integers(0, 5)),
    st.lists(st.integers(0, 2**63 - 1), max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.sampled_from([0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32]), max_size=5),
)  # fmt: skip


@given(columns=st.dictionaries(st.sampled_from("abcd"), COLUMN, min_size=1))
@settings(deadline=None, max_examples=200)
def test_any_columns_are_read_back(columns: dict[str, list[int]]) -> None:
    rows = min(map(len, columns.values()))
    given_columns = {n: np.array(v[:rows], dtype=np.int64) for n, v in columns.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "t.arrow")
        written = write_table(path, tuple(columns), given_columns, extra={"more": 7})
        table = Table(path, tuple(columns), size_bytes=written.size_bytes)
        assert (table.num_rows, table.meta["more"]) == (rows, 7)
        order = np.arange(rows)[::-1]
        for name, values in given_columns.items():
            column = table.columns[name]
            assert column.take(order).tolist() == values[order].tolist()
            assert column.take(order).dtype == np.int64
            assert [column.item(row) for row in range(rows)] == values.tolist()
            assert column.slice(1, rows).tolist() == values[1:].tolist()


def test_a_column_is_as_narrow_as_its_values(tmp_path: Path) -> None:
    rows = 10_000
    random = np.random.default_rng(0)
    columns = {
        "same": np.full(rows, 9),
        "steps": np.arange(rows, dtype=np.uint32) * 3 + 5,
        "byte": random.integers(0, 256, rows),
        "pair": random.integers(0, 65_536, rows),
        "wide": random.integers(0, 2**40, rows),
        "signed": random.integers(-3, 3, rows),
    }
    columns["twin"] = columns["pair"].astype(np.uint64)
    written = write_table(str(tmp_path / "t"), tuple(columns), columns)
    assert 10 * rows < written.size_bytes < 10 * rows + 4000  # 1 + 2 + (4 + 1) + 2 bytes a row
    found = Table(str(tmp_path / "t"), tuple(columns)).columns
    assert found["same"] == Line(base=9, step=0) and found["steps"] == Line(base=5, step=3)
    assert found["twin"] is found["pair"] and isinstance(found["wide"], Wide)
    kinds = {n: c.values.dtype.name for n, c in found.items() if isinstance(c, Stored)}
    assert kinds == {"byte": "uint8", "pair": "uint16", "signed": "int16", "twin": "uint16"}
    byte = found["byte"]
    assert isinstance(byte, Stored)
    assert not byte.values.flags.owndata and not byte.values.flags.writeable


def test_the_digest_is_of_names_and_values(tmp_path: Path) -> None:
    def digest(**columns: list[int]) -> str:
        values = {name: np.array(column) for name, column in columns.items()}
        return write_table(str(tmp_path / "t"), tuple(columns), values).digest

    digests = [
        digest(a=[1, 2, 4], b=[9, 9, 8]),
        digest(a=[1, 2, 5], b=[9, 9, 8]),
        digest(b=[1, 2, 4], a=[9, 9, 8]),
        digest(a=[1, 2, 4], b=[9, 9, 9]),
        digest(a=[1, 2, 4], b=[1, 2, 4]),
        digest(a=[], b=[]),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(a=[1, 2, 4], b=[9, 9, 8]) == digests[0]


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_table(str(path), ("a",), {"a": np.array([1, 5, 2])})
    with pytest.raises(StaleIndexError, match="is not a table of this index version"):
        Table(str(path), ("a", "b"))
    with pytest.raises(StaleIndexError, match="bytes, 3 when it was written"):
        Table(str(path), ("a",), size_bytes=3)
    with pa.ipc.new_file(str(path), pa.schema([("a", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1])], names=["a"]))
    with pytest.raises(StaleIndexError, match="is not a table of this index version"):
        Table(str(path), ("a",))
    path.write_bytes(b"")
    with pytest.raises(StaleIndexError, match="cannot be read"):
        Table(str(path), ("a",))
    assert os.listdir(tmp_path) == ["t"]
    with pytest.raises(ValueError, match="column b has 1 rows, not 2"):
        write_table(str(path), ("a", "b"), {"a": np.arange(2), "b": np.arange(1)})


def test_a_spool_is_the_same_on_disk(tmp_path: Path) -> None:
    parts = [np.arange(start, start + 700_000) for start in range(0, 3_500_000, 700_000)]
    spool = Spool("u4", str(tmp_path))
    for part in parts:
        spool.add(part)
    values = spool.finish()
    assert isinstance(values, np.memmap) and os.listdir(tmp_path) == []
    assert np.array_equal(values, np.arange(3_500_000))
    twice = joined("u8", str(tmp_path), [values, values[:5]])
    assert len(twice) == 3_500_005 and twice[-1] == 4
    assert Spool("u2", str(tmp_path)).finish().tolist() == []
