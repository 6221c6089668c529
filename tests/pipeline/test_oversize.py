"""Samples longer than a pack, indexed, planned by each policy and built, against their text."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage.datasets import picture, write_jsonl, write_zip

from dataservice.core.plan import Plan
from dataservice.core.settings import (
    KindShare,
    Oversize,
    Phase,
    PlanSettings,
    Segregation,
    SourceShare,
)
from dataservice.core.tables import REASONS
from dataservice.core.vision import VisionRules, target_size
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.records import parse_record
from dataservice.storage.sources import RecordFormat, SourceFiles

PACK_LENGTH = 128
RULES = VisionRules(patch=4, merge=2, min_pixels=64, max_pixels=1600)
SOURCES = ("mixed", "text")
PICTURES = {f"{w}x{h}.png": (w, h) for w, h in ((8, 9), (16, 24), (33, 40), (90, 70), (30, 200))}


def write_data(folder: Path) -> None:
    """Three shards a source; texts and numbers of images of all lengths around a pack's."""
    rng = np.random.Generator(np.random.Philox(3))
    names = list(PICTURES)

    def sample(number: int) -> dict[str, Any]:
        images = [names[i] for i in rng.integers(0, len(names), (0, 1, 2, 4, 8, 45)[number % 6])]
        texts = [f"{number}." + "x" * int(n) for n in rng.integers(0, 9, len(images) + 1)]
        question = texts[0] + "".join("<image>" + text for text in texts[1:])
        if number % 4 == 3:
            question += "y" * int(rng.integers(0, 300))
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "z" * (number % 7)}]
        return {"image": images, "conversations": turns}

    for shard in range(3):
        write_zip(
            folder / f"mixed-{shard}.zip", {name: picture(*size) for name, size in PICTURES.items()}
        )
        write_jsonl(folder / f"mixed-{shard}.jsonl", *(sample(30 * shard + i) for i in range(30)))
        lengths = rng.integers(1, 4 * PACK_LENGTH, 12).tolist()
        write_jsonl(folder / f"text-{shard}.jsonl", *({"text": "t" * n} for n in lengths))


@dataclass
class Document:
    start: int
    ids: np.ndarray
    labels: np.ndarray
    sizes: list[int]
    """Image tokens of its images."""
    pack_length: int


@dataclass
class Epoch:
    documents: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    """By sample key."""
    packs: list[list[str]] = field(default_factory=list)
    """The sample keys in each."""
    counts: Counter[str] = field(default_factory=Counter)


class World:
    def __init__(self, folder: Path) -> None:
        write_data(folder / "data")
        self.text = TextRenderer.build(TextSettings())
        sources = [SourceFiles(name=n, records=(f"{folder}/data/{n}-*.jsonl",)) for n in SOURCES]
        report = build_index(sources, str(folder / "index"), counter=lambda: self.text)
        assert (report.num_samples, report.num_rejected) == (126, 0)
        self.index = Index.open(str(folder / "index"))
        self.lines = {}
        for path in sorted((folder / "data").glob("*.jsonl")):
            offset = 0
            for line in path.read_bytes().splitlines(keepends=True):
                self.lines[f"{path.name.split('-')[0]}/{path.name}@{offset}"] = line
                offset += len(line)
        self.reader = ShardReader(None, deadline_s=30, retries=0)
        self.pools = BuildPools(decode_threads=2, read_threads=2)

    def close(self) -> None:
        self.pools.close()
        self.reader.close()

    def epoch(self, oversize: Oversize, **options: Any) -> Epoch:
        """Every pack of the plan's one epoch, built and compared with what was planned."""
        settings = PlanSettings(
            sources=tuple(SourceShare(name=name) for name in SOURCES),
            **{"pack_length": PACK_LENGTH, "vision": RULES, "oversize": oversize, **options},
        )
        plan = Plan(settings, self.index)
        found = Epoch()
        for lane in range(plan.num_lanes):
            windows = plan.windows_in(lane)
            assert windows is not None
            for number in range(windows):
                window = plan.window(lane, number)
                found.counts.update(
                    dict(zip(REASONS, window.counts.sum(axis=1).tolist(), strict=True))
                )
                for pack in range(window.num_packs):
                    self.build(window, pack, found)
        return found

    def build(self, window: Any, pack: int, found: Epoch) -> None:
        spec = self.index.pack_spec(window, pack, rules=RULES)
        assert spec.pack_length == window.pack_length
        built = build_pack(
            spec,
            reader=self.reader,
            renderer=self.text,
            formats=dict.fromkeys(SOURCES, RecordFormat()),
            rules=RULES,
            holes={},
            storage_holes=False,
            decoder=ImageDecoder(RULES, DecodeLimits()),
            limits=DecodeLimits(),
            pool=self.pools,
        )
        assert built.new_holes == {}
        arrays = built.arrays
        grids = arrays["image_grid_thw"].prod(axis=1)
        assert len(arrays["input_ids"]) == window.pack_length
        assert len(grids) == window.num_images[pack]
        assert grids.sum() == len(arrays["pixel_values"]) == window.num_patches[pack]
        image_tokens = (arrays["input_ids"] == self.text.image_token).sum()
        assert image_tokens * 4 == grids.sum()
        assert image_tokens == window.image_tokens[pack]
        bounds = arrays["cu_seqlens"].tolist()
        keys = [item.key for item in spec.items]
        assert built.meta["sample_keys"] == [item.piece_key for item in spec.items]
        found.packs.append(keys)
        for number, (key, item) in enumerate(zip(keys, spec.items, strict=True)):
            place = slice(bounds[number], bounds[number + 1])
            found.documents[key].append(
                Document(
                    start=item.start,
                    ids=arrays["input_ids"][place],
                    labels=arrays["labels"][place],
                    sizes=(grids[arrays["image_doc_ids"] == number] // 4).tolist(),
                    pack_length=window.pack_length,
                )
            )
        assert bounds[len(keys)] == window.tokens[pack]
        if not any(item.images and item.stop < item.total_tokens for item in spec.items):
            assert (arrays["labels"] != -100).sum() == window.loss_tokens[pack]

    def rendered(self, key: str, sizes: list[int]) -> Any:
        """The whole sample, with `sizes` of its first images and one token for each other."""
        record = parse_record(self.lines[key])
        return self.text.render(record, sizes + [1] * (len(record.images) - len(sizes)))

    def planned_sizes(self, key: str, max_pixels: int = RULES.max_pixels) -> list[int]:
        names = json.loads(self.lines[key]).get("image", [])
        found = []
        for width, height in (PICTURES[name] for name in names):
            high, wide = target_size(
                height, width, patch=4, merge=2, min_pixels=64, max_pixels=max_pixels
            )
            found.append(high * wide // 64)
        return found

    def spans(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """(first token, end) of each image."""
        begins = np.flatnonzero(ids == self.text.special_tokens["<|vision_start|>"])
        ends = np.flatnonzero(ids == self.text.special_tokens["<|vision_end|>"]) + 1
        return list(zip(begins.tolist(), ends.tolist(), strict=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


def check_pieces(world: World, key: str, documents: list[Document]) -> None:
    """A text-only sample is there once, whole or in pieces, with its labels."""
    whole = world.rendered(key, [])
    ordered = sorted(documents, key=lambda document: document.start)
    ids = np.concatenate([document.ids for document in ordered])
    assert ids.tolist() == whole.ids.tolist()
    expected = np.where(whole.loss, whole.ids, -100)
    expected[[document.start for document in ordered]] = -100
    assert np.concatenate([d.labels for d in ordered]).tolist() == expected.tolist()


def check_prefix(world: World, key: str, document: Document) -> None:
    """A sample with images is there up to its cut, no image cut."""
    whole = world.rendered(key, document.sizes)
    stop = len(document.ids)
    assert document.ids.tolist() == whole.ids[:stop].tolist()
    assert document.labels.tolist() == np.where(whole.loss, whole.ids, -100)[:stop].tolist()
    assert not any(begin < stop < end for begin, end in world.spans(whole.ids))


def lengths(world: World, sizes: dict[str, list[int]]) -> dict[str, int]:
    return {key: len(world.rendered(key, sizes[key]).ids) for key in world.lines}


@pytest.mark.parametrize("policy", ["shrink", "truncate", "drop"])
def test_an_epoch_by_each_policy(world: World, policy: Oversize) -> None:
    epoch = world.epoch(policy)
    planned = {key: world.planned_sizes(key) for key in world.lines}
    length = lengths(world, planned)
    least = lengths(world, {key: world.planned_sizes(key, 64) for key in world.lines})
    expected: Counter[str] = Counter()
    for key in world.lines:
        documents = epoch.documents.get(key, [])
        if not planned[key]:
            expected["split"] += length[key] > PACK_LENGTH
            check_pieces(world, key, documents)
            continue
        if length[key] > PACK_LENGTH and (policy == "drop" or least[key] > PACK_LENGTH):
            if policy != "truncate":
                expected["dropped_long"] += 1
                assert not documents
                continue
        (document,) = documents
        check_prefix(world, key, document)
        if length[key] <= PACK_LENGTH:
            assert (len(document.ids), document.sizes) == (length[key], planned[key])
        elif policy == "shrink":
            expected["shrunk"] += 1
            assert len(document.sizes) == len(planned[key])
            assert least[key] <= len(document.ids) <= PACK_LENGTH
        else:
            spans = world.spans(world.rendered(key, planned[key]).ids)
            cut_through = [begin for begin, end in spans if begin < PACK_LENGTH < end]
            assert len(document.ids) == min([PACK_LENGTH, *cut_through])
            kept = sum(end <= PACK_LENGTH for _, end in spans)
            assert document.sizes == planned[key][:kept]
            expected["images_cut" if kept < len(spans) else "truncated"] += 1
    assert +epoch.counts == +expected
    reasons = {"shrink": {"shrunk", "dropped_long"}, "truncate": {"truncated", "images_cut"}}
    assert (+epoch.counts).keys() == {"split"} | reasons.get(policy, {"dropped_long"})


def test_phases_change_pack_length_and_picture_sizes(world: World) -> None:
    phases = (
        Phase(windows=1, pack_length=64, max_pixels=256),
        Phase(windows=1, pack_length=256),
        Phase(max_pixels=400),
    )
    epoch = world.epoch("truncate", phases=phases, lanes=2, window=16)
    assert {d.pack_length for ds in epoch.documents.values() for d in ds} == {64, 128, 256}
    most = {64: 256, 256: RULES.max_pixels, 128: 400}
    assert epoch.documents.keys() == world.lines.keys()
    for key, documents in epoch.documents.items():
        if not world.planned_sizes(key):
            check_pieces(world, key, documents)
            continue
        (document,) = documents
        check_prefix(world, key, document)
        sizes = world.planned_sizes(key, most[document.pack_length])
        assert document.sizes == sizes[: len(document.sizes)]


def test_a_segregated_epoch_has_every_sample_in_packs_of_its_kind(world: World) -> None:
    whole = world.epoch("truncate")
    kinds = Segregation(text=KindShare(micro_steps=1), vision=KindShare(micro_steps=1))
    epoch = world.epoch("truncate", segregate=kinds)
    assert epoch.documents.keys() == whole.documents.keys() == world.lines.keys()
    for keys in epoch.packs:
        assert len({bool(world.planned_sizes(key)) for key in keys}) == 1
    for key, documents in epoch.documents.items():
        if world.planned_sizes(key):
            (document,) = documents
            check_prefix(world, key, document)
            assert document.ids.tolist() == whole.documents[key][0].ids.tolist()
        else:
            check_pieces(world, key, documents)
    assert +epoch.counts == +whole.counts
