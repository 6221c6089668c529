"""Documents that begin at multiples of `plan.align`: planned, built, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline.small_data import FORMATS, RULES, Data, talk

from dataservice.core.packspec import PackSpec
from dataservice.core.plan import Plan
from dataservice.core.settings import Oversize, PlanSettings, SourceShare
from dataservice.core.tables import REASONS
from dataservice.pipeline.documents import IGNORE
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import SourceFiles
from trainer_client.batch import VisionInfo, check_pack

VISION = VisionInfo(
    patch=RULES.patch, merge=RULES.merge, temporal_patch=2, mean=RULES.mean, std=RULES.std
)
BARE = {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Ho."}]}
RECORDS: list[Any] = [
    [talk("What: <image>", "One.", "tall.jpg"), BARE, talk("<image>", "Two.", "small.png")],
    talk("And <image>, <image>?", "Two.", ["small.png", "large.jpg"]),
    [{"text": "First of all."}, {"text": "A second, äöü."}, {"text": "x" * 240}],
    *({"text": "z" * length} for length in range(3, 40, 5)),
    {"text": "longer than a pack, " * 20},
    talk("<image>" + "w" * 250, "Cut.", ["large.jpg"]),
]
TEXT = TextRenderer.build(TextSettings())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("aligned"), RECORDS)


@pytest.fixture(scope="module")
def build() -> Iterator[Callable[[PackSpec], BuiltPack]]:
    with (
        BuildPools(decode_threads=2, read_threads=2) as pools,
        ShardReader(None, deadline_s=30, retries=0) as reader,
    ):
        yield lambda spec, **options: build_pack(
            spec,
            reader=reader,
            renderer=TEXT,
            formats=FORMATS,
            rules=RULES,
            storage_holes=False,
            decoder=ImageDecoder(RULES, DecodeLimits()),
            limits=DecodeLimits(),
            pool=pools,
            **({"holes": {}} | options),
        )


def documents(built: BuiltPack) -> list[tuple[bytes, bytes]]:
    """Tokens and labels of each, without filler."""
    found = []
    bounds, lengths = built.arrays["cu_seqlens"].tolist(), built.arrays["doc_lengths"].tolist()
    for first, length in zip(bounds, lengths[: built.meta["num_docs"]], strict=False):
        parts = [built.arrays[name][first : first + length] for name in ("input_ids", "labels")]
        found.append((parts[0].tobytes(), parts[1].tobytes()))
    return found


@pytest.mark.parametrize("align", [2, 8, 24])
def test_an_aligned_pack_has_the_documents_of_one_that_is_not(data, build, align) -> None:
    items = [data.item(number, TEXT) for number in (0, 4, 1, 2, 5)]
    items.append(dataclasses.replace(data.item(2, TEXT), start=7))
    plain = data.pack(*items)
    spec = dataclasses.replace(plain, align=align, pack_length=1200)
    aligned, expected = build(spec), build(plain)
    check_pack(aligned.arrays, aligned.meta, pack_length=1200, vision=VISION, align=align)
    assert documents(aligned) == documents(expected)
    for name in ("pixel_values", "image_grid_thw", "image_doc_ids"):
        assert np.array_equal(aligned.arrays[name], expected.arrays[name])
    assert aligned.meta == expected.meta
    inside = np.zeros(spec.pack_length, bool)
    bounds = aligned.arrays["cu_seqlens"].tolist()
    for first, length in zip(bounds, aligned.arrays["doc_lengths"].tolist(), strict=False):
        inside[first : first + length] = True
    inside[bounds[aligned.meta["num_docs"]] :] = False
    assert (aligned.arrays["input_ids"][~inside] == TEXT.pad_token).all()
    assert (aligned.arrays["labels"][~inside] == IGNORE).all()
    assert inside.sum() == spec.num_tokens


def test_holes_leave_an_aligned_layout_as_it_is(data, build) -> None:
    items = [data.item(number, TEXT) for number in (1, 4)]
    spec = dataclasses.replace(data.pack(*items), align=16, pack_length=320)
    whole, holed = build(spec), build(spec, holes={f"{items[0].key}#1": "bad"})
    for name in ("input_ids", "cu_seqlens", "doc_lengths"):
        assert np.array_equal(whole.arrays[name], holed.arrays[name])
    first = holed.arrays["cu_seqlens"][1]
    assert (holed.arrays["labels"][:first] == IGNORE).all()


@pytest.mark.parametrize(
    ("align", "length", "words"),
    [
        (16, 1000, "no multiple of 16"),
        (16, 64, "144 places aligned to 16, length 64"),
        (64, 256, "its documents, aligned to 64, take 320 places of 256"),
    ],
)
def test_a_spec_that_cannot_be_laid_out_is_refused(data, build, align, length, words) -> None:
    items = [data.item(number, TEXT) for number in (0, 4, 5)]
    spec = dataclasses.replace(data.pack(*items), align=align, pack_length=length)
    with pytest.raises(ValueError, match=words):
        build(spec)


@pytest.mark.parametrize("oversize", ["shrink", "truncate"])
@pytest.mark.parametrize("align", [1, 8, 32])
def test_a_plan_over_an_index_is_built_aligned(
    data: Data, build: Any, tmp_path: Path, align: int, oversize: Oversize
) -> None:
    """Lists of records, texts in pieces, images shrunk or cut off: every pack can be laid out."""
    files = SourceFiles(
        name="src", records=(str(data.jsonl),), images=(str(data.jsonl.with_suffix(".zip")),)
    )
    build_index([files], str(tmp_path), counter=lambda: TEXT)
    index = Index.open(str(tmp_path))
    rows = np.arange(len(RECORDS))
    docs = [len(record) if isinstance(record, list) else 1 for record in RECORDS]
    assert index.columns(0, rows).documents.tolist() == docs
    settings = PlanSettings(
        sources=(SourceShare(name="src"),),
        pack_length=256,
        align=align,
        vision=RULES,
        oversize=oversize,
        lanes=1,
        window=len(RECORDS),
    )
    plan = Plan(settings, index)
    window = plan.window(0, 0)
    assert window.counts[REASONS.index("split")].sum() == 2
    changed = "shrunk" if oversize == "shrink" else "truncated"
    assert window.counts[REASONS.index(changed)].sum() >= (oversize == "truncate")
    tokens = 0
    for number in range(window.num_packs):
        built = build(index.pack_spec(window, number, rules=RULES))
        check_pack(built.arrays, built.meta, pack_length=256, vision=VISION, align=align)
        starts = built.arrays["cu_seqlens"]
        assert (starts % align == 0).all()
        assert all(a < b for a, b in pairwise(starts.tolist()))
        tokens += int(built.arrays["doc_lengths"][: built.meta["num_docs"]].sum())
    assert tokens == window.tokens.sum()
