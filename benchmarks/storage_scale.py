"""Odd sizes of data sets, from files to built packs: memory and time of each, in a fresh process.

python benchmarks/storage_scale.py [--quick] [--only CASE ...]

one_shard     one record file, eight DP ranks
three_shards  three record files, two DP ranks
tiny          ten million samples of a few bytes
references    a sample with 3,000 images, among ordinary ones
array         one JSON array of a gigabyte

Each case writes its files, then a process of its own indexes them, plans the first steps and
builds their packs; its memory is the largest resident set of it and of any process it starts,
mapped files included. --quick takes a twentieth of the two large ones.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from figures import Figure
from PIL import Image

BOUND_MB = 1024
"""Of the process and of each that it starts."""
BUILT_STEPS = 2


def _picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((64, 48)).save(out, "JPEG", quality=80)
    return out.getvalue()


def _text(number: int, size: int) -> str:
    return (f"{number} is a number. " * (size // 15 + 1))[:size]


def _shards(folder: Path, count: int) -> None:
    for shard in range(count):
        with (folder / f"{shard}.jsonl").open("w") as file:
            for i in range(3000):
                file.write(json.dumps({"text": _text(i, 200 + 37 * (i % 41))}) + "\n")


def _tiny(folder: Path, share: float) -> None:
    with (folder / "tiny.jsonl").open("wb", buffering=1 << 20) as file:
        for start in range(0, int(10_000_000 * share), 10_000):
            file.write(b"".join(b'{"text": "%d"}\n' % n for n in range(start, start + 10_000)))


def _references(folder: Path) -> None:
    names = [f"{i:04}.jpg" for i in range(3000)]
    with zipfile.ZipFile(folder / "many.zip", "w") as archive:
        for i, name in enumerate(names):
            archive.writestr(name, _picture(i))
    with (folder / "many.jsonl").open("w") as file:
        for i in range(200):
            shown = names if i == 100 else names[i : i + 2]
            asked = {"from": "human", "value": "<image>" * len(shown) + "What is it?"}
            told = {"from": "gpt", "value": _text(i, 300)}
            file.write(json.dumps({"image": shown, "conversations": [asked, told]}) + "\n")


def _array(folder: Path, share: float) -> None:
    with (folder / "all.json").open("w", buffering=1 << 20) as file:
        number = 0
        while file.tell() < share * 1e9:
            file.write("[\n" if number == 0 else ",\n")
            turns = [
                {"from": "human", "value": _text(number, 200)},
                {"from": "gpt", "value": _text(number + 1, 550)},
            ]
            file.write(json.dumps({"id": str(number), "conversations": turns}))
            number += 1
        file.write("]\n")


CASES: dict[str, tuple[Callable[[Path, float], None], int, int]] = {
    "one_shard": (lambda folder, _: _shards(folder, 1), 8, 8192),
    "three_shards": (lambda folder, _: _shards(folder, 3), 2, 8192),
    "tiny": (_tiny, 8, 8192),
    "references": (lambda folder, _: _references(folder), 2, 32768),
    "array": (_array, 8, 8192),
}
"""Name: what writes the files into a folder, DP ranks, pack length."""


def work(folder: Path, dp_size: int, pack_length: int) -> dict[str, float]:
    """Index, plan and build, in this process and those it starts."""
    from dataservice.config import load_config
    from dataservice.core.plan import Plan
    from dataservice.core.settings import Grid
    from dataservice.indexing import update_index
    from dataservice.pipeline.images import DecodeLimits, ImageDecoder
    from dataservice.pipeline.materialize import build_pack
    from dataservice.pipeline.pool import BuildPools
    from dataservice.pipeline.text import TextRenderer
    from dataservice.storage.index import Index
    from dataservice.storage.objects import ShardReader

    path = folder / "config.yaml"
    path.write_text(
        f"job: scale\nindex_dir: {folder}/index\nstate_dir: {folder}/state\n"
        f"sources: [{{name: s, records: ['{folder}/*.json*']}}]\n"
        f"plan: {{pack_length: {pack_length}, packer: lbf}}\n"
        "vision: {min_pixels: 784}\n"
    )
    config = load_config(path)
    began = time.perf_counter()
    report = update_index(config)
    indexed_s = time.perf_counter() - began
    began = time.perf_counter()
    index = Index.open(config.index_dir)
    plan = Plan(config.plan, index)
    grid = Grid(dp_size=dp_size, micro_steps=1)
    cursor, packs, tokens, images, first_s = plan.start(), 0, 0, 0, 0.0
    with ShardReader(None) as reader, BuildPools(decode_threads=2) as pools:
        for _ in range(BUILT_STEPS):
            step = plan.step(cursor, grid)
            if step is None:
                break
            cursor = step.next_cursor
            for lane, window, number in zip(
                step.lane.tolist(), step.window.tolist(), step.number.tolist(), strict=True
            ):
                if lane < 0:
                    continue
                spec = index.pack_spec(plan.window(lane, window), number, rules=config.plan.vision)
                built = build_pack(
                    spec,
                    reader=reader,
                    renderer=TextRenderer.build(config.text),
                    formats={source.name: source.format for source in config.sources},
                    rules=config.plan.vision,
                    holes={},
                    storage_holes=False,
                    decoder=ImageDecoder(config.plan.vision, DecodeLimits()),
                    limits=DecodeLimits(),
                    pool=pools,
                )
                first_s = first_s or time.perf_counter() - began
                assert not built.new_holes, built.new_holes
                packs, tokens = packs + 1, tokens + spec.num_tokens
                images = max(images, *(item.kept_images for item in spec.items))
    own, started = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "samples": report.num_samples,
        "rejected": report.num_rejected,
        "index_s": indexed_s,
        "first_pack_s": first_s,
        "packs": packs,
        "fill": tokens / max(packs * pack_length, 1),
        "most_images": images,
        "own_mb": own,
        "started_mb": started,
        "index_mb": sum(f.stat().st_size for f in (folder / "index").iterdir()) / 1e6,
    }


def measured(quick: bool, names: list[str]) -> Iterator[Figure]:
    for name in names:
        write, dp_size, pack_length = CASES[name]
        with tempfile.TemporaryDirectory(prefix="storage-scale-") as place:
            write(Path(place), 0.05 if quick else 1.0)
            size_mb = sum(f.stat().st_size for f in Path(place).iterdir()) / 1e6
            inside = [sys.executable, __file__, "--inside", place, str(dp_size), str(pack_length)]
            done = subprocess.run(inside, stdout=subprocess.PIPE, check=True, text=True)
            told = json.loads(done.stdout)
        most_mb = max(told["own_mb"], told["started_mb"])
        yield Figure(
            name=f"{name}: memory",
            value=most_mb,
            unit="MB",
            target=f"at most {BOUND_MB} MB",
            reached=most_mb <= BOUND_MB and told["rejected"] == 0 and told["packs"] > 0,
            note=(
                f"{size_mb:,.0f} MB of files, {told['samples']:,} samples, indexed in "
                f"{told['index_s']:.1f} s ({told['index_mb']:,.1f} MB of index), first pack "
                f"{told['first_pack_s']:.2f} s later; {told['packs']} packs of {dp_size} ranks, "
                f"fill {100 * told['fill']:.1f} %, at most {told['most_images']} images a sample; "
                f"itself {told['own_mb']:.0f} MB, largest process it started "
                f"{told['started_mb']:.0f} MB"
            ),
        )


def run(quick: bool) -> list[Figure]:
    return list(measured(quick, list(CASES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        folder, dp_size, pack_length = options.inside
        print(json.dumps(work(Path(folder), int(dp_size), int(pack_length))))
        return
    for figure in measured(options.quick, options.only):
        mark = "ok " if figure.reached else "BAD"
        print(f"{mark} {figure.name}: {figure.value:,.0f} {figure.unit} ({figure.target})")
        print(f"    {figure.note}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
