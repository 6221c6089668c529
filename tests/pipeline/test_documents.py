"""Records that are lists of records: several documents of one sample, in a pack."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pipeline.small_data import FORMATS, RULES, Data, num_patches, talk

from dataservice.core.packspec import ItemSpec, PackSpec
from dataservice.errors import StaleIndexError
from dataservice.pipeline.documents import IGNORE
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack, record_key
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.objects import ShardReader
from dataservice.storage.records import parse_record
from dataservice.storage.sources import RecordFormat

ONE = talk("What: <image>", "One.", "tall.jpg")
TWO = talk("And <image>, <image>?", "Two.", ["small.png", "large.jpg"])
BARE = {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Ho."}]}
TEXTS = [{"text": "First of all."}, {"text": "A second, äöü."}, {"text": "x" * 40}]
RECORDS: list[Any] = [[ONE, BARE, TWO], ONE, BARE, TWO, TEXTS, *TEXTS]
TOGETHER, TOGETHER_TEXT = 0, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("documents"), RECORDS)


@pytest.fixture(scope="module", params=["plain", "chatml"])
def text(request: pytest.FixtureRequest) -> TextRenderer:
    return TextRenderer.build(TextSettings(template=request.param))


@pytest.fixture
def build(text: TextRenderer) -> Iterator[Callable[..., BuiltPack]]:
    with BuildPools(decode_threads=2, read_threads=2) as pools:
        reader = ShardReader(None, deadline_s=30, retries=0)

        def built(spec: PackSpec, **options: Any) -> BuiltPack:
            values = {
                "reader": reader,
                "renderer": text,
                "formats": FORMATS,
                "rules": RULES,
                "holes": {},
                "storage_holes": False,
                "decoder": ImageDecoder(RULES, DecodeLimits()),
                "limits": DecodeLimits(),
                "pool": pools,
            }
            return build_pack(spec, **(values | options))

        yield built
        reader.close()


def numbered(data: Data, text: TextRenderer, *numbers: int) -> list[ItemSpec]:
    return [data.item(number, text) for number in numbers]


def test_a_list_of_records_is_packed_as_its_records_are_alone(data, text, build) -> None:
    together = build(data.pack(*numbered(data, text, TOGETHER, 2), room=3))
    alone = build(data.pack(*numbered(data, text, 1, 2, 3, 2), room=3))
    for name, array in alone.arrays.items():
        assert np.array_equal(together.arrays[name], array), name
    assert together.arrays["image_doc_ids"].tolist() == [0, 2, 2]
    assert together.meta["num_docs"] == alone.meta["num_docs"] == 4
    assert len(together.arrays["cu_seqlens"]) == 6


def test_the_key_of_a_document_is_that_of_its_part_of_the_sample(data, text, build) -> None:
    sample, other = numbered(data, text, TOGETHER, 2)
    built = build(data.pack(other, sample, other))
    bounds = built.arrays["cu_seqlens"][1:5] - other.total_tokens
    parts = [f"{sample.key}[{start}:{stop}]" for start, stop in pairwise(bounds.tolist())]
    assert bounds[-1] == sample.total_tokens
    assert built.meta["sample_keys"] == [other.key, *parts, other.key]


def test_a_hole_takes_the_whole_sample_but_not_its_documents(data, text, build) -> None:
    sample, other = numbered(data, text, TOGETHER, 2)
    spec = data.pack(sample, other)
    whole = build(spec)
    holed = build(spec, holes={f"{sample.key}#1": "bad"})
    labels = holed.arrays["labels"]
    assert (labels[: sample.total_tokens] == IGNORE).all()
    assert np.array_equal(
        labels[sample.total_tokens :], whole.arrays["labels"][sample.total_tokens :]
    )
    for name in ("input_ids", "cu_seqlens", "image_doc_ids", "image_grid_thw"):
        assert np.array_equal(whole.arrays[name], holed.arrays[name])
    assert holed.meta["sample_keys"] == whole.meta["sample_keys"]


def test_a_record_that_cannot_be_had_is_one_document(data, text, build) -> None:
    sample, other = numbered(data, text, TOGETHER, 2)
    built = build(data.pack(sample, other), holes={record_key(sample.key): "gone"})
    assert built.meta["sample_keys"] == [sample.key, other.key]
    assert built.arrays["image_doc_ids"].tolist() == [0, 0, 0]
    assert built.arrays["cu_seqlens"].tolist()[1] == sample.total_tokens


def test_pieces_of_a_long_text_keep_the_documents_apart(data, text, build) -> None:
    (sample,) = numbered(data, text, TOGETHER_TEXT)
    whole = text.render(parse_record(data.lines[TOGETHER_TEXT]), [])
    assert len(whole.starts) == 3
    for size in (7, whole.starts[1], 31):
        cuts = [*range(0, sample.total_tokens, size), sample.total_tokens]
        found = []
        for start, stop in pairwise(cuts):
            piece = dataclasses.replace(sample, start=start, stop=stop)
            built = build(data.pack(piece, room=0))
            bounds = built.arrays["cu_seqlens"].tolist()
            assert (built.arrays["labels"][bounds[:-1]] == IGNORE).all()
            assert built.meta["num_docs"] == len(bounds) - 1
            found += [start + bound for bound in bounds[:-1]]
        assert found == sorted({*cuts[:-1], *whole.starts})


def test_what_is_cut_off_has_no_documents(data, text, build) -> None:
    (sample,) = numbered(data, text, TOGETHER)
    record = parse_record(data.lines[TOGETHER])
    sizes = [num_patches(image) // 4 for image in sample.images]
    starts = text.render(record, sizes).starts
    for stop, kept, docs in ((starts[1], 1, 1), (starts[1] + 3, 1, 2), (starts[2], 1, 2)):
        cut = dataclasses.replace(sample, stop=stop, kept_images=kept)
        built = build(data.pack(cut, room=2))
        assert built.meta["num_docs"] == docs
        assert built.arrays["image_doc_ids"].tolist() == [0] * kept


def test_records_are_read_by_the_format_of_their_source(text, build, tmp_path) -> None:
    turns = [{"who": "Q", "says": "<1>?"}, {"who": "A", "says": "x"}]
    written = [talk("<image>?", "x", "tall.jpg"), {"talk": turns, "image": "tall.jpg"}]
    fmt = RecordFormat(
        placeholders=("<{n}>",),
        fields=(("conversations", "talk"), ("from", "who"), ("value", "says")),
        roles=(("Q", "user"), ("A", "assistant")),
    )
    data = Data(tmp_path, written)
    item, line = data.item(0, text), data.lines[1]
    renamed = dataclasses.replace(
        item, offset=item.length + 1, length=len(line), crc32=zlib.crc32(line)
    )
    expected = build(data.pack(item))
    built = build(data.pack(renamed), formats={"src": fmt})
    for name, array in expected.arrays.items():
        assert np.array_equal(built.arrays[name], array), name
    with pytest.raises(StaleIndexError, match="'conversations' is missing"):
        build(data.pack(renamed))
    with pytest.raises(ValueError, match="no record format for the source src"):
        build(data.pack(renamed), formats={})
