"""What one worker process makes of a corpus, beside the same decode in a bare loop.

    python benchmarks/pipeline.py CORPUS_DIR [--threads N] [--packs N] [--repeats N] [--json]

CORPUS_DIR has a folder for each source: NAME.jsonl files, and NAME.zip files where it has images.

    bare loop       one thread: zipfile, PIL open, turn, RGB, resize to the planned size, patches;
                    no text, no packs
    build           worker's builders and pools: build_pack, the pack is dropped
    build + encode  the same, and the frames that would be sent
    stream          the real worker, its coordinator and planner, each a process, and a client in
                    another one that reads every pack by gRPC

A stream's time begins before its session opens, so give it more than a few packs.
Every measurement is a process of its own; the four take turns `--repeats` times, over the same
packs. Figures are medians; a ratio is the median of the ratios within one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageOps

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.state_log import StateLog
from dataservice.actors.worker import BUILDERS, Worker
from dataservice.cli.index_view import open_index
from dataservice.config import Config, load_config
from dataservice.core.packspec import PackSpec
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.pipeline.images import DecodeLimits, ImageDecoder, decoder_fingerprint
from dataservice.pipeline.materialize import build_pack
from dataservice.pipeline.pool import BuildPools
from dataservice.pipeline.text import TextRenderer
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.server import start_server
from dataservice.storage.objects import ShardReader
from dataservice.wire.codec import encode_pack
from dataservice.wire.messages import GetStatus

SPAWN = multiprocessing.get_context("spawn")
GRID = Grid(dp_size=1, micro_steps=4)
LIMIT_S = 900.0
"""Of one measurement."""
WARM_UP_PACKS = 2
MODES = ("bare loop", "build", "build + encode", "stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    seconds: float
    cpu_s: float
    """Of the process that decodes."""
    peak_bytes: int
    """Of that process, resident."""


@dataclass(kw_only=True)
class Group:
    """A source, or all of them together, and what was measured on it."""

    name: str
    packs: int
    images: int
    megapixels: float
    turns: list[dict[str, Measured]] = field(default_factory=list)

    def seconds(self, mode: str) -> float:
        return statistics.median(turn[mode].seconds for turn in self.turns)

    def ratio(self, mode: str) -> float:
        """How many times the bare loop's speed."""
        return statistics.median(t[MODES[0]].seconds / t[mode].seconds for t in self.turns)

    def cpu_s(self, mode: str) -> float:
        return statistics.median(turn[mode].cpu_s for turn in self.turns)

    def peak_bytes(self, mode: str) -> int:
        return max(turn[mode].peak_bytes for turn in self.turns)


# ---- the corpus ----------------------------------------------------------------------------------


def source_names(corpus: Path) -> list[str]:
    names = sorted(p.name for p in corpus.iterdir() if p.is_dir() and any(p.glob("*.jsonl")))
    if not names:
        raise SystemExit(f"{corpus}: no folder with *.jsonl files in it")
    return names


def make_config(corpus: Path, names: Sequence[str], folder: Path, threads: int) -> Config:
    sources = []
    for name in names:
        source: dict[str, Any] = {"name": name, "records": str(corpus / name / "*.jsonl")}
        if any((corpus / name).glob("*.zip")):
            source["images"] = str(corpus / name / "*.zip")
        sources.append(source)
    settings = {
        "job": "benchmark",
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": sources,
        "plan": {"epochs": 1, "remainder": "drop"},
        "workers": {"decode_threads": threads, "decode_deadline_s": 120.0},
        "serving": {"port": 0, "plan_ahead_steps": 64},
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return load_config(folder / "config.yaml")


def planned_packs(config: Config, most: int) -> list[PackSpec]:
    """The first packs of the plan, whole steps of GRID."""
    index = open_index(config)
    plan = Plan(config.plan, index)
    specs: list[PackSpec] = []
    step = plan.step(plan.start(), GRID)
    while step is not None and len(specs) + GRID.num_packs <= most:
        specs += [
            index.pack_spec(plan.window(lane, window), number, rules=config.plan.vision)
            for lane, window, number in zip(
                step.lane.tolist(), step.window.tolist(), step.number.tolist(), strict=True
            )
        ]
        step = plan.step(step.next_cursor, GRID)
    return specs


# ---- without transport: each runs in a process of its own ----------------------------------------


def measured(work: Callable[[Sequence[PackSpec]], None], specs: Sequence[PackSpec]) -> Measured:
    work(specs[:WARM_UP_PACKS])
    wall, cpu = time.perf_counter(), time.process_time()
    work(specs)
    return Measured(
        seconds=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        peak_bytes=peak_bytes(os.getpid()),
    )


def bare_loop(config: Config, specs: Sequence[PackSpec]) -> Measured:
    Image.MAX_IMAGE_PIXELS = None
    archives: dict[str, zipfile.ZipFile] = {}
    rules = config.plan.vision

    def work(packs: Sequence[PackSpec]) -> None:
        for spec in packs:
            for image in (image for item in spec.items for image in item.kept):
                url = spec.shards[image.shard].url
                if url not in archives:
                    archives[url] = zipfile.ZipFile(url)
                size = (image.target_width, image.target_height)
                bare_patches(archives[url].read(image.member), size, rules.patch, rules.merge)

    return measured(work, specs)


def bare_patches(data: bytes, size: tuple[int, int], patch: int, merge: int) -> np.ndarray | None:
    """The decode as a loop without a service would do it; None for a damaged picture."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            ImageOps.exif_transpose(picture, in_place=True)
            picture.load()
            rgb = picture if picture.mode == "RGB" else picture.convert("RGB")
    except OSError:
        return None
    if rgb.size != size:
        rgb = rgb.resize(size, Image.Resampling.BICUBIC)
    rows, columns = rgb.height // (patch * merge), rgb.width // (patch * merge)
    blocks = np.asarray(rgb).reshape(rows, merge, patch, columns, merge, patch, 3)
    order = (0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(blocks.transpose(order)).reshape(-1, 3 * patch * patch)


def build(config: Config, specs: Sequence[PackSpec], encode: bool) -> Measured:
    workers = config.workers
    reader, renderer = ShardReader(None), TextRenderer.build(config.text)
    limits = DecodeLimits(deadline_s=workers.decode_deadline_s, max_pixels=workers.max_image_pixels)
    with (
        BuildPools(decode_threads=workers.decode_threads) as pools,
        ThreadPoolExecutor(BUILDERS) as builders,
    ):

        def one(spec: PackSpec) -> None:
            built = build_pack(
                spec,
                reader=reader,
                renderer=renderer,
                formats={source.name: source.format for source in config.sources},
                rules=config.plan.vision,
                holes={},
                storage_holes=False,
                decoder=ImageDecoder(config.plan.vision, limits),
                limits=limits,
                pool=pools,
            )
            if encode:
                encode_pack(built.arrays, built.meta)

        result = measured(lambda packs: list(builders.map(one, packs)).clear(), specs)
        reader.close()
    return result


def in_own_process(call: Callable[..., Measured], *given: object) -> Measured:
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        return pool.submit(call, *given).result(LIMIT_S)


# ---- with transport ------------------------------------------------------------------------------


def serve_coordinator(config: Config, endpoint: Any) -> None:
    async def serve() -> None:
        os.makedirs(config.state_dir, exist_ok=True)
        log = StateLog(os.path.join(config.state_dir, "coordinator.journal"))
        coordinator = Coordinator(config, PlannerProcess(), log)
        server = await start_server(coordinator=coordinator)
        await coordinator.start()
        endpoint.send(server.endpoint)
        await asyncio.to_thread(endpoint.recv)
        await server.stop(0)
        await coordinator.stop()

    asyncio.run(serve())


def serve_worker(coordinator: str) -> None:
    asyncio.run(Worker(coordinator=coordinator, worker_id=uuid.uuid4().hex, node="n0").run())


@contextmanager
def running_coordinator(config: Config) -> Iterator[str]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_coordinator, args=(config, there))
    process.start()
    try:
        if not here.poll(60.0):
            raise SystemExit("the coordinator did not start within 60 s")
        yield here.recv()
        here.send("stop")
        process.join(20.0)
    finally:
        process.kill()
        process.join()


@contextmanager
def running_worker(coordinator: str) -> Iterator[int]:
    """Yields its process number once it is the one live worker."""
    process = SPAWN.Process(target=serve_worker, args=(coordinator,))
    process.start()
    try:
        await_workers(coordinator, 1)
        assert process.pid is not None and process.is_alive()
        yield process.pid
    finally:
        process.kill()
        process.join()
    await_workers(coordinator, 0)


def await_workers(coordinator: str, count: int) -> None:
    until = time.monotonic() + 60.0
    with CoordinatorClient(coordinator) as client:
        while time.monotonic() < until:
            status = json.loads(client.call(GetStatus(), 10.0).status)
            if len(status["workers"]) == count:
                return
            time.sleep(0.1)
    raise SystemExit(f"the coordinator did not come to {count} live workers within 60 s")


def stream(coordinator: str, num_packs: int) -> Measured:
    from trainer_client import PackStream  # not above: the worker must not load torch

    with running_worker(coordinator) as pid:
        cpu = cpu_seconds(pid)
        started = time.perf_counter()
        with PackStream(
            coordinator, job="benchmark", dp_rank=0, dp_size=1, micro_steps=GRID.micro_steps
        ) as batches:
            for _ in range(num_packs):
                next(batches)
            seconds = time.perf_counter() - started
            return Measured(
                seconds=seconds, cpu_s=cpu_seconds(pid) - cpu, peak_bytes=peak_bytes(pid)
            )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


# ---- the run -------------------------------------------------------------------------------------


def measure_group(
    name: str, config: Config, most_packs: int, repeats: int, say: Callable[[str], None]
) -> Group:
    specs = planned_packs(config, most_packs)
    pictures = [image for spec in specs for item in spec.items for image in item.kept]
    group = Group(
        name=name,
        packs=len(specs),
        images=len(pictures),
        megapixels=sum(p.width * p.height for p in pictures) / 1e6,
    )
    with running_coordinator(config) as coordinator:
        for turn in range(repeats):
            say(f"{name}: {len(specs)} packs, {len(pictures)} images, turn {turn + 1} of {repeats}")
            results = {
                "bare loop": in_own_process(bare_loop, config, specs),
                "build": in_own_process(build, config, specs, False),
                "build + encode": in_own_process(build, config, specs, True),
                "stream": stream(coordinator, len(specs)),
            }
            group.turns.append(results)
    return group


def environment(threads: int) -> dict[str, str]:
    names = ("numpy", "grpcio", "zstandard", "torch")
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, load {os.getloadavg()[0]:.2f} at the start",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{n} {version(n)}" for n in names)]
        ),
        "decoder": decoder_fingerprint(),
        "worker": f"1 process, {threads} decode threads, {BUILDERS} builders",
    }


def table(groups: Sequence[Group]) -> str:
    head = f"{'':16}{'images/s':>10}{'packs/s':>10}{'x bare':>8}{'CPU ms/image':>14}{'peak MB':>9}"
    lines = []
    for group in groups:
        lines += [
            "",
            f"{group.name}: {group.packs} packs, {group.images} images, "
            f"{group.megapixels:.0f} megapixels, {len(group.turns)} turns",
            head,
        ]
        for mode in MODES:
            seconds = group.seconds(mode)
            images = f"{group.images / seconds:.1f}"
            packs = f"{group.packs / seconds:.2f}"
            cpu = f"{1000 * group.cpu_s(mode) / group.images:.2f}" if group.images else "-"
            peak = f"{group.peak_bytes(mode) / 1e6:.0f}"
            lines.append(
                f"{mode:16}{images:>10}{packs:>10}{group.ratio(mode):>8.2f}{cpu:>14}{peak:>9}"
            )
    return "\n".join(lines)


def as_json(groups: Sequence[Group], about: dict[str, str]) -> str:
    return json.dumps(
        {
            **about,
            "groups": [
                {
                    **asdict(group),
                    "ratio": {mode: group.ratio(mode) for mode in MODES},
                    "images_per_s": {m: group.images / group.seconds(m) for m in MODES},
                    "packs_per_s": {m: group.packs / group.seconds(m) for m in MODES},
                }
                for group in groups
            ],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="decode threads of the worker")
    parser.add_argument("--packs", type=int, default=2000, help="most packs a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    about = environment(given.threads)
    corpus = given.corpus.resolve()
    names = source_names(corpus)
    with_images = [n for n in names if any((corpus / n).glob("*.zip"))]
    groups = []
    with tempfile.TemporaryDirectory(prefix="pipeline-benchmark-") as folder:
        for name, sources in [("all sources", names), *((n, [n]) for n in with_images)]:
            config = make_config(corpus, sources, Path(folder) / name, given.threads)
            groups.append(
                measure_group(
                    name,
                    config,
                    given.packs,
                    given.repeats,
                    lambda text: print(text, file=sys.stderr, flush=True),
                )
            )
    if given.json:
        print(as_json(groups, about))
        return
    options = f"--threads {given.threads} --packs {given.packs} --repeats {given.repeats}"
    print(f"command   python benchmarks/pipeline.py CORPUS_DIR {options}")
    for name, value in about.items():
        print(f"{name:10}{value}")
    print(table(groups))


if __name__ == "__main__":
    main()
