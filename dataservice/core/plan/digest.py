"""What identifies a plan, and each of its phases.

Invariants: two plans with equal digests give equal windows and steps; two plans whose digests of a
phase are equal give equal windows from the start of that phase up to the nearer of its two ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dataservice.core.order.mixing import PhaseMix
from dataservice.core.plan.stream import Stream
from dataservice.core.settings import PlanSettings
from dataservice.core.tables import IndexView, SourceStats

PLAN_VERSION = 3

_NOT_OF_WINDOWS = (
    "balance",
    "epochs",
    "lanes",
    "pack_length",
    "packer",
    "phases",
    "remainder",
    "segregate",
    "sources",
    "vision",
    "weight_by",
    "window",
)
"""Settings that windows depend on only by what `_stream` holds of them, or not at all."""


def _settings(settings: PlanSettings) -> dict[str, Any]:
    """Without what changes no plan at its default, so that plans made before it was there keep
    their digests."""
    found = dataclasses.asdict(settings)
    if settings.align == 1:
        del found["align"]
    return found


def plan_digest(settings: PlanSettings, phases: Sequence[str], streams: Sequence[Stream]) -> str:
    """`phases` are the digests of its phases."""
    return _hex(
        settings=_settings(settings),
        phases=phases,
        ends=[_ends(streams, number) for number in range(len(phases))],
    )


def phase_digests(
    settings: PlanSettings, index: IndexView, streams: Sequence[Stream]
) -> tuple[str, ...]:
    found: list[str] = []
    base = {
        name: value for name, value in _settings(settings).items() if name not in _NOT_OF_WINDOWS
    }
    kinds = settings.segregate is not None
    sources = {
        source.number: _of_source(index.sources[source.number], kinds=kinds)
        for stream in streams
        for phase in stream.phases
        for source in phase.sources
    }
    for number in range(len(streams[0].phases)):
        found.append(
            _hex(
                plan_version=PLAN_VERSION,
                settings=base,
                index=index.fingerprint,
                proportion=_proportion(settings),
                before=[found[-1], _ends(streams, number - 1)] if found else None,
                streams=[_stream(sources, stream, stream.phases[number]) for stream in streams],
            )
        )
    return tuple(found)


def _ends(streams: Sequence[Stream], phase: int) -> list[tuple[int | None, int | None]]:
    phases = [stream.phases[phase] for stream in streams]
    return [(phase.end_window, phase.last_pack) for phase in phases]


def _proportion(settings: PlanSettings) -> list[tuple[int, int]] | None:
    """Of the kinds in every step: (micro-steps in lowest terms, packs a cell)."""
    if settings.segregate is None:
        return None
    kinds = (settings.segregate.text, settings.segregate.vision)
    common = math.gcd(*(kind.micro_steps for kind in kinds))
    return [(kind.micro_steps // common, kind.packs_per_cell) for kind in kinds]


def _of_source(stats: SourceStats, *, kinds: bool) -> str:
    """How many samples have no image matters only where the plan takes the kinds apart."""
    content = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    if not kinds:
        del content["shard_text_samples"], content["shard_vision_samples"]
    return _hex(**content)


def _stream(sources: Mapping[int, str], stream: Stream, phase: PhaseMix) -> dict[str, Any]:
    return {
        "kind": stream.mixture.kind,
        "lanes": stream.num_lanes,
        "window": stream.mixture.window_samples,
        "pack_length": phase.pack_length,
        "packer": phase.packer,
        "vision": dataclasses.asdict(phase.rules),
        "sources": [
            [sources[source.number], str(source.share), str(source.repeat)]
            for source in phase.sources
        ],
    }


def _hex(**content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
