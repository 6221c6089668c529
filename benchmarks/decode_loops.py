"""What is done with a plan's packs: decoded in a bare loop, or built by a worker's threads.

Each function prepares and warms up, and returns the work to measure.
"""

from __future__ import annotations

import os
import threading
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from decode_candidates import by_pillow, patchified, pillow, target_of
from decode_corpus import pictures_of
from measuring import Work
from PIL import Image

from dataservice.actors.build_queue import Job
from dataservice.actors.building import builders
from dataservice.actors.worker_tools import WorkerTools, encoded
from dataservice.config import Config
from dataservice.core.packspec import TOKEN_BYTES, ImageSpec, ItemSpec, PackSpec
from dataservice.errors import ImageError
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.materialize import BuiltPack
from dataservice.pipeline.specs import image_tokens
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.records import Record, reader_of
from dataservice.wire.encoded import EncodedPack

WARM_UP_PACKS = 3
EMPTY = EncodedPack({}, {})
Decode = Callable[[bytes, ImageSpec], object]


def bare_loop(config: Config, specs: Sequence[PackSpec]) -> Work:
    """zipfile, our decoder, patches into one buffer over and over; no text, no packs."""
    rules = config.plan.vision
    decoder = ImageDecoder(rules, DecodeLimits())
    most = max((i.target_width * i.target_height for i in pictures_of(specs)), default=0)
    buffer = np.empty(rules.pixel_shape(most // rules.patch**2), np.uint8)

    def decode(data: bytes, image: ImageSpec) -> None:
        rows, _ = rules.pixel_shape(image.target_width * image.target_height // rules.patch**2)
        decoder.prepare(data, image)(buffer[:rows])

    return _loop(decode, specs)


def bare_loop_with_texts(config: Config, specs: Sequence[PackSpec]) -> Work:
    """The same and, a pack at a time, its records read, parsed and tokenised."""
    pictures, texts = bare_loop(config, specs), _texts(config)
    texts(_few(specs))

    def work() -> None:
        pictures()
        texts(specs)

    return work


def _texts(config: Config) -> Callable[[Sequence[PackSpec]], None]:
    renderer = TextRenderer.build(config.text)
    formats = {source.name: source.format for source in config.sources}
    files: dict[str, int] = {}

    def sample(spec: PackSpec, item: ItemSpec) -> tuple[Record, list[int]]:
        url = spec.shards[item.shard].url
        if url not in files:
            files[url] = os.open(url, os.O_RDONLY)
        line = os.pread(files[url], item.length, item.offset)
        record = reader_of(replace(formats[item.source], layout=item.layout)).read(line)
        return record, [image_tokens(image, config.plan.vision) for image in item.images]

    def work(packs: Sequence[PackSpec]) -> None:
        for spec in packs:
            renderer.render_all([sample(spec, item) for item in spec.items])

    return work


def pillow_loop(config: Config, specs: Sequence[PackSpec]) -> Work:
    """zipfile, PIL open, turn, RGB, resize, patches by numpy: a loop without us."""
    Image.MAX_IMAGE_PIXELS = None
    warnings.simplefilter("ignore")
    rules = config.plan.vision

    def decode(data: bytes, image: ImageSpec) -> None:
        patchified(by_pillow(pillow(data, image), target_of(image)), rules)

    return _loop(decode, specs)


def _loop(decode: Decode, specs: Sequence[PackSpec]) -> Work:
    archives: dict[str, zipfile.ZipFile] = {}

    def work(packs: Sequence[PackSpec]) -> None:
        for spec in packs:
            for image in pictures_of([spec]):
                url = spec.shards[image.shard].url
                if url not in archives:
                    archives[url] = zipfile.ZipFile(url)
                try:
                    decode(archives[url].read(image.member), image)
                except (ImageError, OSError):
                    continue

    work(_few(specs))
    return lambda: work(specs)


def _few(specs: Sequence[PackSpec]) -> Sequence[PackSpec]:
    """To warm up with: some that have pictures, if any do."""
    return sorted(specs[:50], key=lambda spec: spec.num_patches)[-WARM_UP_PACKS:]


def sent(built: BuiltPack) -> EncodedPack:
    """After all has been done to it that is done for a reader on another host."""
    pack = encoded(built)
    for _ in pack.frames():
        pass
    return pack


def worker(config: Config, specs: Sequence[PackSpec], frames: bool = True) -> Work:
    """A worker's queue, builders and pools; with `frames`, packs become what would be sent. Who
    would fetch a pack takes it at once."""
    tools = WorkerTools(config, lambda: None, _no_coordinator, lambda: ("benchmark", 0))
    jobs = [_job(config, number, spec) for number, spec in enumerate(specs)]

    def one(job: Job) -> None:
        built = tools.build(job, {})
        tools.queue.finish(job, sent(built) if frames else EMPTY)
        tools.queue.served(job.pack_id)

    for spec in _few(specs):
        one(_job(config, 0, spec))

    def work() -> None:
        left, done = threading.Semaphore(0), len(jobs)

        def build(text_only: bool) -> None:
            while (job := tools.queue.take(text_only=text_only)) is not None:
                one(job)
                left.release()

        threads = [
            threading.Thread(target=build, args=(text_only,), name=name, daemon=True)
            for name, text_only in builders(tools.decode_threads)
        ]
        for thread in threads:
            thread.start()
        tools.queue.start_session(1)
        tools.queue.add(*jobs)
        for _ in range(done):
            left.acquire()
        tools.close()

    return work


def _job(config: Config, number: int, spec: PackSpec) -> Job:
    return Job(
        session=1,
        pack_id=f"{number}",
        need=(number, 0, 0),
        spec=spec,
        holes={},
        storage_holes=False,
        size_bytes=TOKEN_BYTES * spec.pack_length
        + config.plan.vision.patch_bytes * spec.num_patches,
    )


def _no_coordinator(request: object) -> object:
    raise NotImplementedError(f"{type(request).__name__}: there is no coordinator here")
