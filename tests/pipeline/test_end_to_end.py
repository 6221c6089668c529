"""The demo corpus, indexed, planned and built, against what a reader of its files finds."""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.plan import Plan
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.core.tables import REASONS
from dataservice.core.vision import VisionRules
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack, build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import SourceFiles

DATA = Path(__file__).parents[1] / "data"
PACK_LENGTH = 8192
RULES = VisionRules(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 200, exact=True)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
HOLE = "images/cell-081.jpg"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> list[BuiltPack]:
    """Every pack of one epoch."""
    names = ("text", "caption", "multi")
    sources = [SourceFiles(name=n, records=(str(DATA / n / "*.jsonl"),)) for n in names]
    renderer = TextRenderer.build(TextSettings())
    index_dir = str(tmp_path_factory.mktemp("index"))
    report = build_index(sources, index_dir, counter=lambda: renderer)
    assert (report.num_samples, report.num_rejected) == (650, 0)
    index = Index.open(index_dir)
    settings = PlanSettings(
        sources=tuple(SourceShare(name=n) for n in names),
        pack_length=PACK_LENGTH,
        vision=RULES,
    )
    plan = Plan(settings, index)
    built = []
    with (
        ShardReader(None, deadline_s=30, retries=0) as reader,
        BuildPools(decode_threads=2) as pools,
    ):
        windows = [
            (lane, w) for lane in range(plan.num_lanes) for w in range(plan.windows_in(lane))
        ]
        for lane, number in windows:
            window = plan.window(lane, number)
            assert {REASONS[i] for i in np.flatnonzero(window.counts.any(axis=1))} <= {"split"}
            for k in range(window.num_packs):
                spec = index.pack_spec(window, k, rules=RULES)
                built.append(
                    build_pack(
                        spec,
                        reader=reader,
                        renderer=renderer,
                        formats={source.name: source.format for source in sources},
                        rules=RULES,
                        holes={},
                        storage_holes=False,
                        decoder=ImageDecoder(RULES, DecodeLimits()),
                        limits=DecodeLimits(),
                        pool=pools,
                    )
                )
                labels = built[-1].arrays["labels"]
                if not built[-1].new_holes:
                    assert window.loss_tokens[k] == (labels != -100).sum()
                assert window.num_images[k] == len(built[-1].arrays["image_grid_thw"])
                assert window.num_patches[k] == len(built[-1].arrays["pixel_values"])
    return built


def source_records() -> dict[str, dict]:
    """By sample key; read with json alone."""
    found = {}
    for path in sorted(DATA.glob("*/*.jsonl")):
        offset = 0
        for line in path.read_bytes().splitlines(keepends=True):
            found[f"{path.parent.name}/{path.name}@{offset}"] = json.loads(line)
            offset += len(line)
    return found


def documents(packs: list[BuiltPack]):
    """(key, first token, ids, labels, pictures as (grid, patches)) of every document.

    The key of a piece of a split text ends in "[<first token>:<end>]", which is taken off.
    """
    for pack in packs:
        arrays = pack.arrays
        bounds = arrays["cu_seqlens"]
        assert bounds[-1] == len(arrays["input_ids"]) == PACK_LENGTH
        starts = np.append(0, np.cumsum(arrays["image_grid_thw"].prod(axis=1)))
        for number, key in enumerate(pack.meta["sample_keys"]):
            piece = slice(bounds[number], bounds[number + 1])
            pictures = [
                (
                    tuple(arrays["image_grid_thw"][i]),
                    arrays["pixel_values"][starts[i] : starts[i + 1]],
                )
                for i in np.flatnonzero(arrays["image_doc_ids"] == number)
            ]
            key, _, cut = key.partition("[")
            start = int(cut.partition(":")[0] or 0)
            yield key, start, arrays["input_ids"][piece], arrays["labels"][piece], pictures


def text_of(ids: np.ndarray) -> str:
    """Bytes are themselves, an image is a placeholder, other markers a NUL."""
    kept = bytearray()
    for token in ids.tolist():
        if token < 256:
            kept.append(token)
        elif token == 259:
            kept += b"<image>"
        elif token in (256, 257, 258):
            kept.append(0)
    return kept.decode()


def expected_text(record: dict) -> str:
    if "text" in record:
        return record["text"] + "\0"
    return "".join(
        f"\0{ROLES[turn['from']]}\n{turn['value']}\0\n" for turn in record["conversations"]
    )


def test_every_sample_is_there_once_with_its_text(packs) -> None:
    pieces = defaultdict(list)
    for key, start, ids, _, _ in documents(packs):
        pieces[key].append((start, ids))
    records = source_records()
    assert pieces.keys() == records.keys()
    for key, record in records.items():
        ordered = sorted(pieces[key], key=lambda piece: piece[0])
        ids = np.concatenate([ids for _, ids in ordered])
        lengths = [len(ids) for _, ids in ordered]
        assert [start for start, _ in ordered] == np.cumsum([0, *lengths])[:-1].tolist()
        assert text_of(ids) == expected_text(record), key
    assert sum(len(found) > 1 for found in pieces.values()) > 20


def test_pixels_equal_the_reference(packs, patches_of) -> None:
    archives = {p.stem: zipfile.ZipFile(p) for p in DATA.glob("*/*.zip")}
    records, compared = source_records(), 0
    for key, _, _, labels, pictures in documents(packs):
        names = records[key].get("image", [])
        names = [names] if isinstance(names, str) else names
        assert len(pictures) == len(names)
        for name, ((frames, rows, columns), patches) in zip(names, pictures, strict=True):
            assert frames == 1
            if name == HOLE:
                assert not patches.any()
                assert (labels == -100).all()
                continue
            data = archives[Path(key.split("@")[0]).stem].read(name)
            expected = patches_of(data, columns * 14, rows * 14, 14, 2)
            assert patches.tobytes() == expected.tobytes(), name
            compared += 1
    for archive in archives.values():
        archive.close()
    assert compared > 300


def test_the_one_truncated_picture_is_the_one_hole(packs) -> None:
    holes = {key: reason for pack in packs for key, reason in pack.new_holes.items()}
    assert len(holes) == 1
    ((key, reason),) = holes.items()
    assert key.startswith("caption/caption-00001.jsonl@") and key.endswith("#0")
    assert reason.startswith("truncated JPEG: ")
    (told,) = [h for pack in packs for h in pack.meta["holes"]]
    assert told.startswith(f"{key}: {reason} ({HOLE} in caption/")


def test_labels_are_the_answers_or_the_text(packs) -> None:
    records = source_records()
    for key, _, ids, labels, _ in documents(packs):
        kept = labels[labels != -100]
        assert (ids[labels != -100] == kept).all()
        record = records[key]
        if "text" in record:
            assert len(kept) == len(ids) - 1 and labels[0] == -100
        elif record.get("image") != HOLE:
            answers = [t["value"] for t in record["conversations"] if t["from"] == "gpt"]
            assert text_of(kept) == "".join(answer + "\0" for answer in answers)
