"""The tables of Trillion Labs' public report on packing for vision-language training.

N open bins by image tokens (v1) and by vision cost (v2), and the report's setting.
Invariants: each table says what the report found; a note says which property of the data explains a
difference.
"""

from __future__ import annotations

import numpy as np
from planner_common import (
    GRAVITY,
    Table,
    packed,
    percent,
    plus,
    relative_time,
    scenario,
    shuffled,
)

from dataservice.core.cost import measure
from dataservice.core.packing import PackRules
from dataservice.core.settings import Grid
from dataservice.core.simulate import simulate
from dataservice.core.simulate.workloads import MEGAPIXEL, correlated, vision


def nbin() -> list[Table]:
    return [_spread(), _versions()]


def _spread() -> Table:
    table = Table(
        title="Spread of a pack's image tokens against open bins N, nbin v1 "
        "(Trillion Labs: it falls with N)",
        columns=("N", "shuffled: std", "fill", "8 open shards: std", "fill", "between ranks"),
        notes=(
            "text80, 32,768 tokens, images up to 1 megapixel. Shuffled: one stream of all sources. "
            "8 open shards: 16 ranks pack their own whole shards; between ranks: std of the "
            "ranks' means.",
            "N evens out packs of one stream and keeps to its mean: on shards of one source each, "
            "the drift between ranks stays as it is.",
        ),
    )
    mixed = shuffled("text80", 200_000, 32_768, 1)
    streams = []
    for rank in range(16):
        columns = correlated(
            "text80", rank, 16, 16_384, 8, pack_length=32_768, max_pixels=MEGAPIXEL
        )
        streams.append(measure(columns, rules=vision(MEGAPIXEL)))
    for bins in (1, 2, 4, 6, 8, 32):
        rules = PackRules(packer="nbin", pack_length=32_768, open_bins=bins)
        found = packed(mixed, rules, len(mixed.length), by="image_tokens")
        ranks = [packed(s, rules, len(s.length), by="image_tokens") for s in streams]
        images = np.concatenate([r.image_tokens for r in ranks])
        table.rows.append(
            (
                str(bins),
                f"{found.image_tokens.std():,.0f}",
                percent(found.fill),
                f"{images.std():,.0f}",
                percent(float(np.mean([r.fill for r in ranks]))),
                f"{np.std([r.image_tokens.mean() for r in ranks]):,.0f}",
            )
        )
    return table


def _versions() -> Table:
    table = Table(
        title="nbin v1 against v2: spread of a pack's vision cost (Trillion Labs: v2 where images "
        "differ, no difference where they are small)",
        columns=("mix, most megapixels", "v1: cost CV", "v2: cost CV", "v1: fill", "v2: fill"),
        notes=(
            "32,768 tokens, 8 open bins, shuffled; cost p * (4096 + p) of an image of p patches.",
            "Up to 1 megapixel an image has at most 4,096 patches: cost is near linear, v2 is v1. "
            "With larger images v2 still changes little here: what spreads cost is single images "
            "that cost more than a mean pack, and "
            "no choice of bin evens those out.",
        ),
    )
    for mix, megapixels in (
        ("text80", 1),
        ("text80", 4),
        ("text80", 16),
        ("mostlyvl", 1),
        ("mostlyvl", 4),
        ("gravity", 16),
    ):
        samples = shuffled(mix, 200_000, 32_768, megapixels)
        rules = PackRules(packer="nbin", pack_length=32_768, open_bins=8)
        one, two = (
            packed(samples, rules, len(samples.length), by=by)
            for by in ("image_tokens", "vit_cost")
        )
        table.rows.append(
            (
                f"{mix}, {megapixels}",
                f"{one.cost_cv:.3f}",
                f"{two.cost_cv:.3f}",
                percent(one.fill),
                percent(two.fill),
            )
        )
    return table


def gravity() -> list[Table]:
    grid = Grid(dp_size=256, micro_steps=16)
    names = ("next_fit", "budget_2d", "nbin_v1", "nbin_v2", "lbf", "balanced")
    reference = {"reference_ranks": 256, "reference_micro_steps": 16}
    pools = {name: GRAVITY.pool(name, grid, 1, **reference) for name in names}
    time = relative_time(pools["lbf"].first((grid,), 1), 1.0)
    found = simulate(pools, time, scenario(grid), num_steps=1, curve=False)
    packers = {summary.packer: summary for summary in found.packers}
    table = Table(
        title="Trillion Labs' setting: 32,768 tokens, text to vision 8:2 by tokens, 90 % of images "
        "up to 2 megapixels, 10 % up to 16",
        columns=("strategy", "fill", "image tokens std", "cost CV", "idle lockstep", "end", "gain"),
        notes=(
            "256 ranks, 16 micro-steps, lanes that mix all sources, windows of 16,384 samples, "
            "quadratic vision cost, LLM time = mean ViT time; gain in tokens a second over "
            "`arrival`.",
            "One image of 16 megapixels costs "
            f"{_largest_image(pools['lbf'].all('cost').mean()):.1f} mean packs; no bin rule can "
            "even that out, rows of like packs can.",
        ),
    )
    for outcome in found.outcomes:
        images = pools[outcome.packer].all("image_tokens")
        table.rows.append(
            (
                outcome.strategy,
                percent(outcome.fill, 2),
                f"{images.std():,.0f}",
                f"{packers[outcome.packer].cost_cv:.2f}",
                percent(outcome.idle_lockstep),
                percent(outcome.idle_end),
                plus(outcome.gain),
            )
        )
    return [table]


def _largest_image(mean_cost: float) -> float:
    patches = 16 * MEGAPIXEL // 256
    return float(patches * (4096 + patches) / mean_cost)
