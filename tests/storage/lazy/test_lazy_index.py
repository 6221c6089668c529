"""The lazy index: the plan of the full index, counted when it is needed and never twice."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.datasets import (
    ByteCounter,
    llava,
    picture,
    write_jsonl,
    write_tar,
    write_zip,
)

from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, KindShare, PlanSettings, Segregation, SourceShare
from dataservice.errors import ConfigError, StaleIndexError, StorageError
from dataservice.storage.archives import Archives
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.lazy import (
    BlocksMissing,
    CountingHere,
    LazyIndex,
    check_lazy_plan,
    scan_sources,
)
from dataservice.storage.lazy import counting as counting
from dataservice.storage.objects import ShardReader, Store, staged_path
from dataservice.storage.sources import RecordFormat, SourceFiles

PICTURES = {f"p{i}.png": picture(20 + 7 * i, 30 + 5 * (i % 4)) for i in range(12)}
GRID = Grid(dp_size=2, micro_steps=2)


@contextmanager
def opened(
    folder: Path, sources: list[SourceFiles], counter: ByteCounter | None = None
) -> Iterator[tuple[LazyIndex, CountingHere]]:
    """Scanned, and counting in this process."""
    counter = counter or ByteCounter()
    scan_sources(sources, str(folder), counter=counter.fingerprint)
    index = LazyIndex.open(str(folder))
    here = CountingHere(index, sources, counter)
    index.blocks.on_missing = here.count_all
    index.on_close(here.close)
    try:
        yield index, here
    finally:
        index.close()


def plan_of(index: Index, names: list[str], **changes: Any) -> Plan:
    shares = tuple(SourceShare(name=name) for name in names)
    values: dict[str, Any] = {"pack_length": 512, "lanes": 2, "window": 40, **changes}
    return Plan(PlanSettings(sources=shares, **values), index)


def text_source(folder: Path, records: int, files: int = 1, **changes: Any) -> SourceFiles:
    for number in range(files):
        lines = [{"text": f"{number} {row} " + "x" * (row % 90)} for row in range(records)]
        write_jsonl(folder / f"t{number:03d}.jsonl", *lines)
    return SourceFiles(name="text", records=(str(folder / "t*.jsonl"),), **changes)


def assert_same_plan(full: Index, lazy: LazyIndex, names: list[str], **changes: Any) -> int:
    """Digests, steps, counts, specs and shards, to the end of the data; the number of packs."""
    plans = plan_of(full, names, **changes), plan_of(lazy, names, **changes)
    assert plans[0].digest == plans[1].digest
    assert plans[0].phase_digests == plans[1].phase_digests
    assert plans[0].warnings == plans[1].warnings
    rules = plans[0].settings.vision
    cursor, packs = plans[0].start(), 0
    while True:
        steps = [plan.step(cursor, GRID) for plan in plans]
        if steps[0] is None or steps[1] is None:
            assert steps == [None, None]
            return packs
        assert steps[0].next_cursor == steps[1].next_cursor
        assert plans[0].counts_in(steps[0]) == plans[1].counts_in(steps[1])
        for lane, window, number in zip(
            steps[0].lane.tolist(), steps[0].window.tolist(), steps[0].number.tolist(), strict=True
        ):
            if lane < 0:
                continue
            windows = [plan.window(lane, window) for plan in plans]
            specs = [
                index.pack_spec(of, number, rules=rules)
                for index, of in zip((full, lazy), windows, strict=True)
            ]
            assert specs[0] == specs[1]
            assert full.shards_of(windows[0]) == lazy.shards_of(windows[1])
            packs += 1
        cursor = steps[0].next_cursor


# ---- the same plan ------------------------------------------------------------------------------


def _records(rng: random.Random, count: int) -> list[object]:
    """Texts, talks about pictures that are there or not, inline pictures, and broken ones."""
    inline = "data:image/png;base64," + base64.b64encode(PICTURES["p3.png"]).decode()
    records: list[object] = []
    for _ in range(count):
        names = [f"p{rng.randrange(13)}.png" for _ in range(rng.randrange(1, 4))]
        kind = rng.random()
        if kind < 0.1:
            records.append(b'{"conversations": [')
        elif kind < 0.45:
            records.append({"text": "x" * rng.randrange(700)})
        elif kind < 0.6:
            records.append(llava("see", inline, *names[:1]))
        elif kind < 0.7:
            records.append(llava("sized", names[0], width=40, height=rng.randrange(20, 60)))
        else:
            records.append(llava("y" * rng.randrange(300), *names))
    return records


def write_parquet(path: Path, rng: random.Random) -> None:
    """Rows with their pictures in a column, one of them broken."""
    rows = [
        {
            "images": [{"bytes": PICTURES[f"p{rng.randrange(12)}.png"], "path": None}] * (i % 3),
            "texts": [{"user": "What?", "assistant": "x" * rng.randrange(90)}],
        }
        for i in range(100)
    ]
    rows[7]["images"] = [{"bytes": b"GIF", "path": "x"}]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=40)


def _sources(folder: Path, rng: random.Random) -> list[SourceFiles]:
    """Three sources: zips beside record files and a folder; a tar; packed and array files."""
    write_zip(folder / "a" / "0.zip", PICTURES)
    half = dict(list(PICTURES.items())[::2])
    write_zip(folder / "a" / "1.zip", half)
    write_tar(folder / "pictures.tar", PICTURES)
    (folder / "pictures").mkdir()
    for name, data in PICTURES.items():
        (folder / "pictures" / name).write_bytes(data)
    for number in range(3):
        write_jsonl(folder / "a" / f"{number}.jsonl", *_records(rng, rng.randrange(1, 150)))
    write_jsonl(folder / "b" / "0.jsonl", *_records(rng, 130))
    lines = [json.dumps(r).encode() for r in _records(rng, 140) if not isinstance(r, bytes)]
    (folder / "c").mkdir()
    (folder / "c" / "0.json").write_bytes(b"[" + b",\n".join(lines) + b"]")
    (folder / "c" / "1.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    write_parquet(folder / "c" / "2.parquet", rng)
    take = rng.choice(["all", "first:70", "end:40%", "random:60%"])
    uris = RecordFormat(data_uris=True)
    return [
        SourceFiles(
            name="a",
            records=(str(folder / "a" / "*.jsonl"),),
            images=(str(folder / "a" / "*.zip"), str(folder / "pictures")),
            take=take,
        ),
        SourceFiles(
            name="b",
            records=(str(folder / "b" / "*.jsonl"),),
            images=(str(folder / "pictures"),),
            format=uris,
        ),
        SourceFiles(
            name="c",
            records=(str(folder / "c" / "*"),),
            images=(str(folder / "pictures.tar"),),
            format=uris,
            take=take,
        ),
    ]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), change=st.sampled_from(["", "drop", "truncate", "auto"]))
def test_the_plan_is_that_of_the_full_index(
    tmp_path_factory: pytest.TempPathFactory, seed: int, change: str
) -> None:
    folder = tmp_path_factory.mktemp("same")
    sources = _sources(folder, random.Random(seed))
    report = build_index(sources, str(folder / "full"), counter=ByteCounter)
    full = Index.open(str(folder / "full"))
    changes: dict[str, Any] = {"oversize": change} if change in ("drop", "truncate") else {}
    if change == "auto":
        changes = {"lanes": None, "window": None, "packer": "lbf"}
    with opened(folder / "lazy", sources) as (lazy, _):
        assert [s.fingerprint for s in full.sources] == [s.fingerprint for s in lazy.sources]
        assert [s.shard_samples for s in full.sources] == [s.shard_samples for s in lazy.sources]
        assert assert_same_plan(full, lazy, ["a", "b", "c"], **changes) > 40
        assert sum(1 for _ in lazy.rejected()) == report.num_rejected > 0


def test_columns_in_any_order(tmp_path: Path) -> None:
    sources = _sources(tmp_path, random.Random(3))
    build_index(sources, str(tmp_path / "full"), counter=ByteCounter)
    full = Index.open(str(tmp_path / "full"))
    rng = np.random.default_rng(1)
    sizes = [sum(stats.shard_samples) for stats in full.sources]
    source = rng.integers(0, 3, 500)
    rows = np.array([rng.integers(0, sizes[of]) for of in source])
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        for name in (
            "text_tokens",
            "loss_tokens",
            "num_docs",
            "image_offsets",
            "width",
            "height",
            "markup",
        ):
            expected = getattr(full.columns(source, rows), name)
            assert np.array_equal(getattr(lazy.columns(source, rows), name), expected), name
        with pytest.raises(IndexError):
            lazy.columns(0, np.array([sizes[0]]))


# ---- what is counted ----------------------------------------------------------------------------


def test_nothing_is_counted_twice_nor_after_a_restart(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 300, files=2)]
    counter = ByteCounter()
    with opened(tmp_path / "lazy", sources, counter) as (lazy, _):
        first = lazy.columns(0, np.array([0, 130, 599]))
        assert counter.counted == 64 + 64 + 300 % 64
        lazy.columns(0, np.array([1, 129, 128, 598, 63]))
        assert counter.counted == 64 + 64 + 300 % 64
    again = ByteCounter()
    with opened(tmp_path / "lazy", sources, again) as (lazy, _):
        assert np.array_equal(
            lazy.columns(0, np.array([0, 130, 599])).text_tokens, first.text_tokens
        )
        assert again.counted == 0
        lazy.columns(0, np.arange(600))
        assert again.counted == 600 - 64 - 64 - 300 % 64
        assert lazy.num_counted() == 10


def test_a_damaged_block_is_counted_again(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 300)]
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        whole = lazy.columns(0, np.arange(300))
        path = tmp_path / "lazy" / lazy.lazy.sources[0].shards[0].blocks
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    counter = ByteCounter()
    with opened(tmp_path / "lazy", sources, counter) as (lazy, _):
        assert np.array_equal(lazy.columns(0, np.arange(300)).text_tokens, whole.text_tokens)
        assert 0 < counter.counted <= 64
    counter = ByteCounter()
    with opened(tmp_path / "lazy", sources, counter) as (lazy, _):
        lazy.columns(0, np.arange(300))
        assert counter.counted == 0


@pytest.mark.parametrize("files", [4, 40])
def test_the_first_step_counts_what_it_needs_whatever_the_data(tmp_path: Path, files: int) -> None:
    """Lanes and windows are found from a bounded sample, the step reads its windows' segments."""
    sources = [text_source(tmp_path, 4096, files=files)]
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        plan = plan_of(lazy, ["text"], window=1024, lanes=4)
        assert lazy.num_counted() == 128
        assert plan.step(plan.start(), GRID) is not None
        # 4 lanes x 1,024 samples = 64 segments of 64; a segment may lie in two blocks
        assert lazy.num_counted() - 128 <= 2 * 64


def test_missing_blocks_are_named_in_one_go(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 640, files=3)]
    with opened(tmp_path / "lazy", sources) as (lazy, here):
        lazy.blocks.on_missing = _raise
        with pytest.raises(BlocksMissing) as caught:
            lazy.columns(0, np.array([5, 64, 700, 1900, 6]))
        assert sorted(caught.value.keys) == [(0, 0), (0, 1), (1, 0), (2, 9)]
        outcomes = here.count(caught.value.keys)
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert lazy.columns(0, np.array([5, 64, 700, 1900, 6])).text_tokens.min() > 0


def _raise(keys: Any) -> None:
    raise BlocksMissing(keys)


# ---- scanning -----------------------------------------------------------------------------------


def test_a_scan_that_finds_nothing_new_writes_no_manifest(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 100)]
    for _ in range(2):
        scan_sources(sources, str(tmp_path / "lazy"), counter="c")
        (tmp_path / "lazy" / "lazy.json").chmod(0o400)
    assert (tmp_path / "lazy" / "lazy.json").stat().st_mode & 0o777 == 0o400


def test_a_second_scan_reads_nothing_and_a_changed_file_alone_is_read(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 300, files=3)]
    scan = lambda: scan_sources(sources, str(tmp_path / "lazy"), counter="bytes")  # noqa: E731
    assert (scan().files_read, scan().files_read) == (3, 0)
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        lazy.columns(0, np.arange(900))
    write_jsonl(tmp_path / "t001.jsonl", *[{"text": "new"}] * 70)
    report = scan()
    assert (report.files_read, report.files_reused, report.num_records) == (1, 2, 670)
    counter = ByteCounter()
    with opened(tmp_path / "lazy", sources, counter) as (lazy, _):
        lazy.columns(0, np.arange(670))
        assert counter.counted == 70


def test_another_counter_counts_anew(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 100)]
    for fingerprint in ("bytes", "words"):
        counter = ByteCounter(fingerprint)
        with opened(tmp_path / "lazy", sources, counter) as (lazy, _):
            lazy.columns(0, np.arange(100))
            assert lazy.fingerprint == fingerprint
        assert counter.counted == 100


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StaleIndexError, match="no lazy index"):
        LazyIndex.open(str(tmp_path))
    scan_sources([text_source(tmp_path, 10)], str(tmp_path / "lazy"), counter="bytes")
    path = tmp_path / "lazy" / "lazy.json"
    path.write_text(path.read_text().replace('"num_records":10', '"num_records":11'))
    with pytest.raises(StaleIndexError, match="damaged"):
        LazyIndex.open(str(tmp_path / "lazy"))


# ---- what cannot be read ------------------------------------------------------------------------


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 300)]
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        write_jsonl(tmp_path / "t000.jsonl", *[{"text": "other"}] * 300)
        with pytest.raises(StaleIndexError, match=r"text/t000\.jsonl"):
            lazy.columns(0, np.array([0]))
        assert lazy.num_counted() == 0


def test_what_cannot_be_read_for_now_is_no_row(tmp_path: Path) -> None:
    """An archive that is away is waited for, a picture that is no picture is rejected at once."""
    write_zip(tmp_path / "a.zip", {**PICTURES, "p0.png": b"no picture"})
    write_jsonl(tmp_path / "a.jsonl", *[llava("see", f"p{i % 12}.png") for i in range(100)])
    sources = [SourceFiles(name="a", records=(str(tmp_path / "a.jsonl"),))]
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        os.rename(tmp_path / "a.zip", tmp_path / "away.zip")
        with pytest.raises(StorageError):
            lazy.columns(0, np.array([0]))
        assert lazy.num_counted() == 0
        os.rename(tmp_path / "away.zip", tmp_path / "a.zip")
        assert np.diff(lazy.columns(0, np.arange(13)).image_offsets).tolist() == [
            0,
            *[1] * 11,
            0,
        ]
        assert len(list(lazy.rejected())) == 6


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {
                "segregate": Segregation(
                    text=KindShare(micro_steps=1), vision=KindShare(micro_steps=1)
                )
            },
            "plan.segregate",
        ),
        ({"epochs": None, "weight_by": "tokens"}, "mean_tokens of 'text' is missing"),
    ],
)
def test_plans_that_need_all_counts_are_refused(changes: dict[str, Any], match: str) -> None:
    share = SourceShare(name="text", weight="1")
    with pytest.raises(ConfigError, match=match):
        check_lazy_plan(PlanSettings(sources=(share,), **changes))
    known = SourceShare(name="text", weight="1", mean_tokens=100)
    check_lazy_plan(PlanSettings(sources=(known,), epochs=None, weight_by="tokens"))


def test_an_archive_that_changed_is_named(tmp_path: Path) -> None:
    """Its pictures are not rejected: they are not those that were meant."""
    write_zip(tmp_path / "a.zip", PICTURES)
    write_jsonl(tmp_path / "a.jsonl", *[llava("see", f"p{i % 12}.png") for i in range(100)])
    sources = [SourceFiles(name="a", records=(str(tmp_path / "a.jsonl"),))]
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        write_zip(tmp_path / "a.zip", {"p0.png": picture(9, 9)})
        with pytest.raises(StaleIndexError, match=r"a\.zip of source a changed"):
            lazy.columns(0, np.array([0]))
        assert lazy.num_counted() == 0


def test_large_records_are_counted_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read together, a block has the same bytes."""
    sources = _sources(tmp_path, random.Random(5))
    blocks = []
    for number, size in enumerate((counting._BATCH_BYTES, 2000, 1)):
        monkeypatch.setattr(counting, "_BATCH_BYTES", size)
        with opened(tmp_path / f"lazy{number}", sources) as (lazy, here):
            keys = [
                (file, block)
                for file, of in enumerate(lazy.lazy.block_files())
                for block in range(of.num_blocks)
            ]
            here.count_all(keys)
            blocks.append([lazy._store.read(*key) for key in keys])
    assert blocks[0] == blocks[1] == blocks[2]


def test_no_row_follows_from_a_damaged_staged_copy(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, 100)]
    cache = tmp_path / "cache"
    cache.mkdir()
    with opened(tmp_path / "lazy", sources) as (lazy, _):
        place = lazy.blocks.place((0, 0))
        Path(staged_path(str(cache), place.shard)).write_bytes(
            Path(place.shard.url).read_bytes().replace(b"x", b"y")
        )
        archives = Archives(lazy_store := Store(), lazy.index_dir, deadline_s=10)
        with ShardReader(str(cache), deadline_s=10, store=lazy_store) as reader:
            counted = counting.BlockCounter(
                sources,
                ByteCounter(),
                reader=reader,
                archives=archives,
                store=lazy_store,
                deadline_s=10,
                roots=lazy.roots,
                folder=lazy.index_dir,
            ).count(place)
        archives.close()
        lazy.columns(0, np.array([0]))
        assert counted == lazy._store.read(0, 0)
