"""The words and numbers of a simulation as people read them, one wording for table and page.

Invariants: a value is worded the same wherever it stands; every assumption that a figure rests on
is said.
"""

from __future__ import annotations

from collections.abc import Mapping

from dataservice.cli.simulate_run import DEFAULT_VIT_MS, Report
from dataservice.core.simulate import Simulation

STRATEGY = {
    "arrival": "arrival order",
    "local": "local reordering",
    "budget_2d": "2D budget",
    "nbin_v1": "N-bin v1",
    "nbin_v2": "N-bin v2",
    "two_pass": "two-pass balance",
    "balanced": "balanced packs, two-pass",
}
WHAT = {
    "arrival": "lbf packs, dealt to ranks in the order they come: the present, to which the others "
    "are compared",
    "local": "the same, each rank computing its own packs by falling cost",
    "budget_2d": "packs limited in image tokens as well as in length, in arrival order",
    "nbin_v1": "several open packs, the next image going to the one with the fewest image tokens, "
    "in arrival order",
    "nbin_v2": "the same by vision-encoder cost",
    "two_pass": "lbf packs placed for least waiting, then for least movement",
    "balanced": "packs made equally costly and full, placed in the same two passes",
}
PACKER = {
    "next_fit": "next fit",
    "best_fit": "best fit",
    "budget_2d": "2D budget",
    "nbin_v1": "N-bin v1",
    "nbin_v2": "N-bin v2",
    "lbf": "lbf",
    "balanced": "balanced",
}
REASON = {
    "split": "longer than a pack, text only: split, every token kept",
    "shrunk": "longer than a pack: images shrunk until it fits",
    "truncated": "longer than a pack: text cut at the end",
    "images_cut": "longer than a pack: cut before an image, the rest left out",
    "over_cap": "above a cap: in a pack of its own",
    "dropped_long": "longer than a pack: left out",
    "rejected": "a record that cannot be used: left out",
    "cut": "given up with the rest of a phase",
}
_SOURCES_SHOWN = 6
SETTING = {
    "dp_size": "ranks",
    "pack_length": "pack length",
    "max_pixels": "max pixels",
    "max_tiles": "max tiles",
    "open_bins": "open bins",
}


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%"


def gain(share: float) -> str:
    return f"{100 * share:+,.1f}%"


def milliseconds(value_ms: float) -> str:
    if value_ms >= 10_000:
        return f"{value_ms / 1000:,.1f} s"
    return f"{value_ms:,.0f} ms" if value_ms >= 10 or value_ms == 0 else f"{value_ms:.2g} ms"


def tokens_per_s(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def title(report: Report) -> str:
    scenario = report.simulation.scenario
    return (
        f"{report.workload}: {scenario.dp_size:,} ranks x {scenario.micro_steps:,} micro-steps, "
        f"packs of {report.simulation.pack_length:,} tokens"
    )


def assumptions(report: Report) -> list[str]:
    """What the figures rest on, one sentence or two each."""
    return [
        _compute(report),
        _meeting(report.simulation),
        _balanced(report),
        _movement(report.simulation),
        _looked_at(report),
    ]


def _compute(report: Report) -> str:
    options, settings, found = report.options, report.settings, report.simulation
    if settings.cost == "fitted" and settings.fitted is not None:
        return (
            f"A pack takes what the fitted cost model {settings.fitted.version} says, on average "
            f"{milliseconds(found.time.pack_ms + found.mean_vit_ms)}."
        )
    llm = milliseconds(found.time.pack_ms)
    if options.llm_ms is not None:
        llm += ", as given"
    elif found.mean_vit_ms > 0:
        llm += ", taken to be the mean pack's vision encoder time, as no --llm-ms was given"
    else:
        llm += ", a value to have one, as no --llm-ms was given and no image costs anything"
    if options.vit_ms_per_token is None:
        per_token = (
            f"{DEFAULT_VIT_MS:g} ms an image token (from the forward times of a public report by "
            "NAVER, a backward pass taking twice as long), as no --vit-ms-per-token was given"
        )
    else:
        per_token = f"{options.vit_ms_per_token:g} ms an image token, as given"
    spread = (
        "in proportion to its image tokens"
        if settings.cost == "image_tokens"
        else f"in proportion to its vit_cost, the sum of p * ({settings.p_ref:,} + p) over "
        f"{'tiles' if settings.vision.mode == 'tiles' else 'images'} of p patches"
    )
    return (
        f"A pack takes the LLM {llm}; the vision encoder takes {per_token}, on average: "
        f"{milliseconds(found.mean_vit_ms)} for the mean pack, {spread}. Forward and backward "
        "together."
    )


def _meeting(found: Simulation) -> str:
    scenario = found.scenario
    if scenario.sync_domain == scenario.dp_size:
        return (
            "All ranks meet at every micro-step (lockstep, as with FSDP): step time and tokens per "
            "second are of that. The idle share at the end of a step is that of ranks which meet "
            "only there (as DDP without synchronisation between micro-steps)."
        )
    if scenario.sync_domain == 1:
        return (
            "Ranks meet only at the end of a step (balance.sync_domain: 1): step time and tokens "
            "per second are of that, and the two-pass balance serves it."
        )
    return (
        f"Groups of {scenario.sync_domain:,} ranks meet at every micro-step, all at the end of a "
        "step (balance.sync_domain): step time and tokens per second are of that, and the "
        "two-pass balance serves it."
    )


def _balanced(report: Report) -> str:
    settings, found = report.settings, report.simulation
    ratio = found.time.pack_ms / found.mean_vit_ms if found.mean_vit_ms > 0 else 1.0
    grid = report.options.grid
    if settings.packer == "balanced":
        return (
            "Balanced packs are the plan's own, made for an LLM-to-ViT ratio of "
            f"{settings.llm_vit_ratio} (plan.llm_vit_ratio; these times give {ratio:.3g}) on "
            f"{settings.reference_ranks:,} ranks x {settings.reference_micro_steps:,} micro-steps."
        )
    return (
        f"Balanced packs are made for these times and this grid; in a config, plan.packer: "
        f"balanced, llm_vit_ratio: {ratio:.3g}, reference_ranks: {grid.dp_size}, "
        f"reference_micro_steps: {grid.micro_steps}."
    )


def _movement(found: Simulation) -> str:
    scenario = found.scenario
    return (
        "Moved packs are those that would have to travel between nodes if each rank had loaded the "
        f"packs of arrival order ({scenario.ranks_per_node} ranks a node) and then passed them on: "
        "a redistribution after loading. Exposed is the time this adds to a step at "
        f"{scenario.node_gbits:g} Gbit/s a node each way, all of it or what is left when the next "
        "micro-step's packs travel during the present one's compute (T = sum of max(compute of g, "
        "transfer of g + 1), plus the first transfer). This service moves nothing at training "
        "time: it plans before it loads, and each pack goes straight to the rank that computes it."
    )


def _looked_at(report: Report) -> str:
    found = report.simulation
    packs = found.num_steps * found.scenario.num_packs
    text = (
        f"Looked at: {found.num_steps:,} step{'s' * (found.num_steps != 1)}, {packs:,} packs of "
        f"the plan's first samples."
    )
    if report.num_phases > 1:
        text += f" The plan has {report.num_phases} phases; this is the first."
    return text


def counted(counts: Mapping[str, Mapping[str, int]]) -> list[tuple[str, int, str]]:
    """(reason, samples in all, by source with the most first), of what was not packed as it is."""
    by_reason: dict[str, dict[str, int]] = {}
    for source, reasons in counts.items():
        for reason, count in reasons.items():
            by_reason.setdefault(reason, {})[source] = count
    rows = []
    for reason in (reason for reason in REASON if reason in by_reason):
        sources = sorted(by_reason[reason].items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{count:,} of {source}" for source, count in sources[:_SOURCES_SHOWN])
        more = len(sources) - _SOURCES_SHOWN
        rows.append(
            (
                REASON[reason],
                sum(by_reason[reason].values()),
                named + (f" and {more} more sources" if more > 0 else ""),
            )
        )
    return rows
