"""What a run leaves out on purpose from a step on: samples become holes, steps are passed over.

Invariants: the plan stays what it is: a step that is passed over is planned and not handed out, a
sample that is left out keeps its place; what acts on a step is a function of the step's number
alone; two settings whose `in_force` at a step is equal give equal packs up to that step.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dataservice.errors import ConfigError

EXCLUDED = "excluded by the config"
"""The reason of the holes of samples that are left out."""
_PIECE = re.compile(r"\[\d+:\d+\]$")
_KEY = re.compile(r"([^/]+)/(.+)@(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcludedSample:
    key: str
    """Sample key, without the bounds of a piece."""
    from_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSteps:
    """In place of step `start` comes what would have been step `stop`, under the number `start`;
    the steps behind it count on from there."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions:
    """Made by `exclusions`."""

    samples: tuple[ExcludedSample, ...] = ()
    """By key, each once."""
    skips: tuple[SkippedSteps, ...] = ()
    """By start, each of them once; a later one counts steps as the run does that has the earlier
    ones behind it."""

    def samples_at(self, step: int) -> frozenset[str]:
        """Keys of the samples that are holes in a step."""
        return frozenset(one.key for one in self.samples if one.from_step <= step)

    def skipped_at(self, step: int) -> int:
        """How many steps are passed over before the packs of a step are taken."""
        return sum(skip.stop - skip.start for skip in self.skips if skip.start == step)

    def in_force(self, step: int) -> str:
        """What acts on steps up to and with `step`, in words with a digest; "" for nothing."""
        samples = [[one.key, one.from_step] for one in self.samples if one.from_step <= step]
        skips = [[skip.start, skip.stop] for skip in self.skips if skip.start <= step]
        if not samples and not skips:
            return ""
        text = json.dumps([samples, skips], separators=(",", ":"), ensure_ascii=True)
        words = [f"{len(samples)} sample{'s' * (len(samples) > 1)}"] if samples else []
        words += [f"steps {start}:{stop}" for start, stop in skips[:4]]
        words += [f"{len(skips) - 4} more ranges of steps"] if len(skips) > 4 else []
        return f"{', '.join(words)} ({hashlib.sha256(text.encode()).hexdigest()[:32]})"


def sample_key(text: str) -> str:
    """Of a sample key, or of a piece's with its bounds behind it; ValueError for neither."""
    key = _PIECE.sub("", text)
    if _KEY.fullmatch(key) is None:
        raise ValueError(
            'should be a sample key as in batch.meta["sample_keys"], such as '
            "caption/part-1.jsonl@5120"
        )
    return key


def parts_of_key(key: str) -> tuple[str, str, int]:
    """(source, shard name in it, offset) of a sample key."""
    found = _KEY.fullmatch(key)
    assert found is not None, key
    return found[1], found[2], int(found[3])


def exclusions(samples: Iterable[ExcludedSample], skips: Iterable[SkippedSteps]) -> Exclusions:
    """A sample that is named twice is left out from the earlier step on. ConfigError for ranges of
    steps that are empty or begin at the same step."""
    first: dict[str, int] = {}
    for one in samples:
        first[one.key] = min(one.from_step, first.get(one.key, one.from_step))
    ranges: dict[int, SkippedSteps] = {}
    for skip in skips:
        if skip.stop <= skip.start:
            raise ConfigError(
                f"exclude: steps {skip.start}:{skip.stop} are none; give A:B with A below B, and a "
                "from_step below B"
            )
        if skip.start in ranges:
            raise ConfigError(
                f"exclude: steps {skip.start}:{ranges[skip.start].stop} and "
                f"{skip.start}:{skip.stop} begin at the same step: make one range of them"
            )
        ranges[skip.start] = skip
    return Exclusions(
        samples=tuple(ExcludedSample(key=key, from_step=first[key]) for key in sorted(first)),
        skips=tuple(ranges[start] for start in sorted(ranges)),
    )
