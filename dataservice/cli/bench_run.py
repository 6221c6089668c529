"""`dataservice bench`: what is measured, and what follows for the number of workers.

Invariants: what is said for people and in JSON is the same; estimates say what they rest on.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table

from dataservice.actors.measuring import Built, Read, built, planned, read
from dataservice.cli import disk_speed
from dataservice.config import Config
from dataservice.core.autoscale import BUSY_AT_MOST
from dataservice.masking import mask_urls

MOST_CACHE_BYTES = 256 << 20
PACK_S = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Seconds a pack that are answered for where nobody says how long a GPU takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    built: Built
    read: Read
    cache: disk_speed.Speed | None
    """None where nothing is staged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Of one GPU, or one data-parallel rank, that takes a pack every `pack_s` seconds."""

    pack_s: float
    cores: float
    """With workers busy BUSY_AT_MOST of their time."""
    workers: float
    """With as many decode threads as here."""
    origin_bytes_per_s: float
    trainer_bytes_per_s: float
    """That it is sent, before compression."""


def measure(config: Config, *, seconds: float, say: Callable[[str], None]) -> Measured:
    """Takes about `seconds` besides what opening the plan takes."""
    say("planning the first steps")
    specs = planned(config, most_s=seconds / 4)
    say(f"building packs for {seconds / 2:.0f} s")
    packs = built(config, specs, most_s=seconds / 2)
    say("reading")
    origin = read(config, specs, most_s=seconds / 8)
    folder, cache = config.staging.cache_dir, None
    if folder is not None:
        with tempfile.TemporaryDirectory(dir=_existing(folder), prefix=".bench-") as own:
            cache = disk_speed.sequential(own, most_bytes=MOST_CACHE_BYTES, most_s=seconds / 16)
    return Measured(built=packs, read=origin, cache=cache)


def _existing(folder: str) -> str:
    """The folder, or the one that it would be made in."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    return folder


def cores_a_pack_per_s(packs: Built) -> float:
    """Core-seconds that a pack takes."""
    return packs.cpu_s / max(1, packs.packs)


def need_of(packs: Built, pack_s: float) -> Need:
    cores = cores_a_pack_per_s(packs) / pack_s / BUSY_AT_MOST
    rate = packs.packs / packs.seconds
    return Need(
        pack_s=pack_s,
        cores=cores,
        workers=1 / pack_s / rate / BUSY_AT_MOST,
        origin_bytes_per_s=packs.read_bytes / packs.packs / pack_s,
        trainer_bytes_per_s=packs.pack_bytes / packs.packs / pack_s,
    )


def told(measured: Measured, *, pack_s: float | None, gpus: int) -> dict[str, Any]:
    """For --json: sizes in bytes, times in seconds."""
    packs, origin = measured.built, measured.read
    needs = [need_of(packs, seconds) for seconds in ([pack_s] if pack_s else PACK_S)]
    return {
        "packs": packs.packs,
        "packs_per_s": packs.packs / packs.seconds,
        "packs_per_core_s": 1 / cores_a_pack_per_s(packs),
        "images_per_s": packs.images / packs.seconds,
        "images_per_core_s": packs.images / packs.cpu_s,
        "cores_used": packs.cpu_s / packs.seconds,
        "decode_threads": packs.threads,
        "decode_share": packs.decode_s / (packs.seconds * packs.threads),
        "pack_bytes": packs.pack_bytes / packs.packs,
        "origin_bytes_a_pack": packs.read_bytes / packs.packs,
        "holes": packs.holes,
        "from_page_cache": packs.again,
        "origin": {
            "url": mask_urls(origin.url),
            "read_bytes": origin.read_bytes,
            "bytes_per_s": origin.read_bytes / max(origin.seconds, 1e-9),
            "streams": origin.streams,
        },
        "cache": None if measured.cache is None else dataclasses.asdict(measured.cache),
        "needs": [
            dataclasses.asdict(need)
            | {"gpus": gpus, "all_workers": math.ceil(gpus * need.workers - 1e-9)}
            for need in needs
        ],
    }


def table_of(found: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    origin, cache = found["origin"], found["cache"]
    table.add_row(
        "one worker here",
        f"{_short(found['packs_per_s'])} packs/s, {_short(found['images_per_s'])} images/s "
        f"(decode threads: {found['decode_threads']}, cores busy: {found['cores_used']:.1f})",
    )
    table.add_row(
        "one core",
        f"{_short(found['packs_per_core_s'])} packs/s, {_short(found['images_per_core_s'])} "
        "images/s",
    )
    table.add_row(
        "a pack",
        f"{decimal(round(found['pack_bytes']))} to the trainer, "
        f"{decimal(round(found['origin_bytes_a_pack']))} read for it",
    )
    table.add_row(
        "origin",
        f"{decimal(round(origin['bytes_per_s']))}/s with {origin['streams']} streams "
        f"({decimal(origin['read_bytes'])} of {origin['url']})",
    )
    if cache is not None:
        table.add_row(
            "cache disk",
            f"writes {decimal(round(cache['write_bytes_per_s']))}/s, reads "
            f"{decimal(round(cache['read_bytes_per_s']))}/s",
        )
    return table


def needs_table(found: dict[str, Any]) -> Table:
    needs = found["needs"]
    gpus = needs[0]["gpus"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("s a pack", "cores\na GPU", "workers\na GPU", "read\na GPU", "sent\na GPU"):
        table.add_column(name, justify="right")
    if gpus > 1:
        table.add_column(f"workers\nof {gpus} GPUs", justify="right")
    for need in needs:
        row = [
            f"{need['pack_s']:g}",
            _short(need["cores"]),
            _short(need["workers"]),
            f"{decimal(round(need['origin_bytes_per_s']))}/s",
            f"{decimal(round(need['trainer_bytes_per_s']))}/s",
        ]
        table.add_row(*row, *[f"{need['all_workers']:,}"] * (gpus > 1))
    return table


def _short(number: float) -> str:
    """Two digits are as exact as the measurement."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def notes(found: dict[str, Any]) -> list[str]:
    """What to know before the figures are believed."""
    said = [
        "A GPU here is a data-parallel rank; cores and workers are for workers that are busy "
        f"{BUSY_AT_MOST:.0%} of their time."
    ]
    if found["from_page_cache"]:
        said.append(
            f"The data gave fewer packs than could be built ({found['packs']:,}): some were built "
            "twice, and read from this machine's memory the second time."
        )
    if found["holes"]:
        said.append(f"Pictures that could not be used: {found['holes']:,}; `dataservice lint`.")
    return said
