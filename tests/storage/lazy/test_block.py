from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.errors import WireError
from dataservice.storage.index_rows import (
    IMAGE_COLUMNS,
    SAMPLE_COLUMNS,
    FolderFile,
    Rejected,
    Rows,
)
from dataservice.storage.lazy.block import BLOCK_ROWS, decode_block, encode_block
from dataservice.storage.records import LAYOUTS

URLS = ["/data/a.zip", "/data/b.zip", "/data/pictures"]
LARGE = st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**40])


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=BLOCK_ROWS))
    num_images = sum(counts)
    values = draw(st.lists(LARGE, min_size=len(counts) + num_images, max_size=400))
    samples = {name: np.resize(np.array(values), len(counts)) for name in SAMPLE_COLUMNS}
    samples["num_images"] = np.array(counts)
    samples["layout"] %= len(LAYOUTS)
    samples["num_docs"] = np.maximum(samples["num_docs"], 1)
    images = {name: np.resize(np.array(values), num_images) for name in IMAGE_COLUMNS}
    inside = draw(st.lists(st.sampled_from(["", "image"]), unique=True, max_size=2))
    archives = st.integers(0, len(URLS) + len(inside) - 1)
    images["archive"] = np.array(
        draw(st.lists(archives, min_size=num_images, max_size=num_images)), dtype=np.int64
    )
    in_folder = images["archive"] == 2
    images["member"] = np.where(in_folder, images["member"] % 3, images["member"])
    files = tuple(
        FolderFile(archive=2, name=f"{i}.png", size_bytes=i, mtime_ns=2**60 + i)
        for i in range(3 if in_folder.any() else draw(st.integers(0, 3)))
    )
    rejected = (Rejected(row=0, line=1, offset=9, reason="ä reason"),) * draw(st.integers(0, 2))
    return Rows(
        samples=samples,
        images=images,
        files=files,
        inside=tuple(inside),
        rejected=rejected,
        again=False,
    )


@settings(max_examples=80, deadline=None)
@given(rows())
def test_a_block_is_read_back_exactly(of: Rows) -> None:
    data = encode_block(of, URLS)
    block = decode_block(data)
    assert data == encode_block(of, URLS)
    for name in SAMPLE_COLUMNS:
        assert block.samples[name].tolist() == of.samples[name].tolist(), name
    for name in set(IMAGE_COLUMNS) - {"archive"}:
        assert block.images[name].tolist() == of.images[name].tolist(), name
    places = [*block.archives, *block.inside]
    every = [*URLS, *of.inside]
    assert [places[n] for n in block.images["archive"].tolist()] == [
        every[n] for n in of.images["archive"].tolist()
    ]
    assert [(places[f.archive], f.name) for f in block.files] == [
        (every[f.archive], f.name) for f in of.files
    ]
    assert block.rejected == of.rejected
    assert np.diff(block.image_starts).tolist() == of.samples["num_images"].tolist()


@settings(max_examples=80, deadline=None)
@given(rows(), st.data())
def test_other_bytes_are_refused_or_are_whole_blocks(of: Rows, data: st.DataObject) -> None:
    stored = bytearray(encode_block(of, URLS))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    try:
        block = decode_block(bytes(stored))
    except WireError:
        return
    assert block.samples["num_images"].sum() == len(block.images["width"])
    assert len({len(values) for values in block.samples.values()}) == 1


@settings(max_examples=10, deadline=None)
@given(rows())
def test_rows_of_no_document_are_refused(of: Rows) -> None:
    of.samples["num_docs"][-1] = 0
    with pytest.raises(WireError, match="a row of no document"):
        decode_block(encode_block(of, URLS))


def test_bytes_that_are_no_block_are_refused() -> None:
    for data in (b"", b"\x00", b"\xc1", b"\x95" + bytes(5), bytes(1000)):
        with pytest.raises(WireError, match="no counted block"):
            decode_block(data)
