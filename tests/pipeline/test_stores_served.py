"""The demo corpus gives the same packs from an object store and a web server as from a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.s3_server import S3Server, put, s3_server, use_credentials
from support.web_server import WebServer, web_server

from dataservice.core.plan import Plan
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.core.vision import VisionRules
from dataservice.errors import StaleIndexError
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer, TextSettings
from dataservice.storage.index import Index
from dataservice.storage.index_build import build_index
from dataservice.storage.objects import ShardReader
from dataservice.storage.sources import SourceFiles

DATA = Path(__file__).parents[1] / "data"
NAMES = ("text", "caption")
RULES = VisionRules(patch=14, merge=2, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64)


def corpus_files() -> list[Path]:
    return sorted(path for name in NAMES for path in (DATA / name).iterdir() if path.is_file())


@pytest.fixture(scope="module")
def on_s3() -> Iterator[S3Server]:
    with s3_server() as server:
        for path in corpus_files():
            put(server, "corpus", f"{path.parent.name}/{path.name}", path.read_bytes())
        yield server


@pytest.fixture(scope="module")
def on_web() -> Iterator[WebServer]:
    with web_server() as server:
        for path in corpus_files():
            server.files[f"/{path.parent.name}/{path.name}"] = path.read_bytes()
        server.headers = {"ETag": '"1"'}
        yield server


def sources_below(root: str, *, globs: bool = True) -> list[SourceFiles]:
    def records(name: str) -> tuple[str, ...]:
        files = sorted((DATA / name).glob("*.jsonl"))
        return (
            (f"{root}/{name}/*.jsonl",)
            if globs
            else tuple(f"{root}/{name}/{file.name}" for file in files)
        )

    return [SourceFiles(name=name, records=records(name)) for name in NAMES]


def make_index(folder: Path, sources: list[SourceFiles]) -> Index:
    report = build_index(
        sources, str(folder), counter=lambda: TextRenderer.build(TextSettings()), deadline_s=30
    )
    assert report.num_rejected == 0
    return Index.open(str(folder))


def packs_of(index: Index, sources: list[SourceFiles]) -> list[tuple[object, dict[str, bytes]]]:
    """Meta and bytes of the packs of the first window of every lane."""
    settings = PlanSettings(
        sources=tuple(SourceShare(name=name) for name in NAMES), pack_length=4096, vision=RULES
    )
    plan = Plan(settings, index)
    renderer = TextRenderer.build(TextSettings())
    built = []
    with (
        ShardReader(None, deadline_s=30, retries=1) as reader,
        BuildPools(decode_threads=2) as pools,
    ):
        for lane in range(plan.num_lanes):
            window = plan.window(lane, 0)
            for number in range(min(window.num_packs, 4)):
                pack = build_pack(
                    index.pack_spec(window, number, rules=RULES),
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
                arrays = {name: array.tobytes() for name, array in pack.arrays.items()}
                built.append((pack.meta["sample_keys"], arrays))
    return built


def test_packs_are_the_same_wherever_the_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_s3: S3Server, on_web: WebServer
) -> None:
    use_credentials(monkeypatch, on_s3)
    local = sources_below(str(DATA))
    expected = packs_of(make_index(tmp_path / "local", local), local)
    assert any(arrays["pixel_values"] for _, arrays in expected)
    for name, remote in (
        ("s3", sources_below("s3://corpus")),
        ("web", sources_below(on_web.url, globs=False)),
    ):
        assert packs_of(make_index(tmp_path / name, remote), remote) == expected, name


def test_an_index_reads_headers_only_and_a_changed_shard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_s3: S3Server
) -> None:
    use_credentials(monkeypatch, on_s3)
    records = (DATA / "caption" / "caption-00000.jsonl").read_bytes()
    archive = (DATA / "caption" / "caption-00000.zip").read_bytes()
    # Bytes before an archive are allowed, and here they stand for all that no reader needs.
    front = bytes(30_000_000)
    put(on_s3, "large", "caption/caption-00000.jsonl", records)
    put(on_s3, "large", "caption/caption-00000.zip", front + archive)
    sources = [SourceFiles(name="caption", records=("s3://large/caption/*.jsonl",))]
    on_s3.count_from_here()
    index = make_index(tmp_path / "index", sources)
    assert on_s3.bodies_bytes < len(records) + len(archive) + 1_000_000
    plan = Plan(PlanSettings(sources=(SourceShare(name="caption"),), vision=RULES), index)
    refs = index.shards_of(plan.window(0, 0))
    put(on_s3, "large", "caption/caption-00000.jsonl", records[::-1])
    changed = next(ref for ref in refs if ref.url.endswith(".jsonl"))
    with (
        ShardReader(None, deadline_s=30, retries=0) as reader,
        pytest.raises(StaleIndexError, match=r"shard caption/caption-00000\.jsonl changed after"),
    ):
        reader.read(changed, 0, 10)
