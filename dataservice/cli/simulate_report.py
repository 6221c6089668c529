"""The page of a simulation: one HTML file with inline SVG, for a browser without network.

Invariants: a function of the report alone; nothing is loaded, and a content policy in the page
forbids it; no script; light and dark follow the reader's system; below 3 MB at any grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rich.filesize import decimal

from dataservice.cli import simulate_plots as plots
from dataservice.cli import simulate_words as words
from dataservice.cli.simulate_run import Report
from dataservice.cli.simulate_style import STYLE
from dataservice.core.simulate import Outcome, Simulation


def page(report: Report) -> str:
    found = report.simulation
    best = found.outcomes[-1]
    title = words.title(report)
    sections = [
        f"<h1>{escape(report.workload)}</h1>",
        f'<p class="lead">{escape(title.partition(": ")[2])}</p>',
        _tiles(found, best),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in report.warnings),
        _heat(found),
        f'<div class="pair">{_idle(found)}{_fill(found)}</div>',
        f'<div class="pair">{_histograms(found)}{_strategy_words(found)}</div>',
        _strategies(found),
        _sweep(report),
        _counts(found),
        _assumptions(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _tiles(found: Simulation, best: Outcome) -> str:
    present = found.outcomes[0]
    tiles = [
        ("idle in arrival order", words.percent(present.idle_sync)),
        (f"idle with {words.STRATEGY[best.strategy]}", words.percent(best.idle_sync)),
        ("tokens a second gained", words.gain(best.gain)),
        ("fill", words.percent(best.fill, 2)),
    ]
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in tiles)
        + "</dl>"
    )


# ---- figures ------------------------------------------------------------------------------------


def _figure(heading: str, body: str, note: str, class_: str = "") -> str:
    return (
        f'<section class="{class_}"><h2>{escape(heading)}</h2><figure>{body}'
        f"<figcaption>{escape(note)}</figcaption></figure></section>"
    )


def _heat(found: Simulation) -> str:
    scenario = found.scenario
    panels = []
    for strategy, cells in found.cells_ms.items():
        rows = min(len(cells), plots.MOST_ROWS)
        panels.append(
            f"<h3>{'before' if strategy == 'arrival' else 'after'}: "
            f"{escape(words.STRATEGY[strategy])}, "
            f"{words.percent(found.outcome(strategy).idle_lockstep)} idle in lockstep</h3>"
            f'<div class="heat"><span class="rows">micro-steps 0 to {rows - 1}</span>'
            f"{plots.heat_map(found, strategy)}"
            f'<span class="columns"><span>rank 0</span><span>rank {scenario.dp_size - 1:,}</span>'
            "</span></div>"
        )
    low, high = plots.shade_range(found)
    keys = "".join(
        f'<span><i class="q{shade}"></i>{escape(words.milliseconds(start))}</span>'
        for shade, start in enumerate(plots.shade_starts(low, high))
        if shade % 3 == 0 or shade + 1 == plots.SHADES
    )
    note = (
        "Every cell is the time that a rank computes in a micro-step of the first step; where "
        "ranks meet at every micro-step, all wait for the strongest shade of each row."
    )
    width = plots.ranks_a_column(scenario.dp_size)
    if width > 1:
        note += f" A column is the slowest of {width} ranks."
    if scenario.micro_steps > plots.MOST_ROWS:
        note += f" The first {plots.MOST_ROWS} of {scenario.micro_steps:,} micro-steps are shown."
    body = "".join(panels) + f'<p class="shades">from {keys}</p>'
    return _figure("Time of every rank in every micro-step", body, note, "wide")


def _idle(found: Simulation) -> str:
    keys = "".join(
        f"<li>{plots.legend_mark(name)}{escape(words.STRATEGY[name])}</li>"
        for name in found.idle_by_ranks
    )
    domain = found.scenario.sync_domain
    meet = "in lockstep" if domain == found.scenario.dp_size else f"where {domain} ranks meet"
    return _figure(
        "Idle share against ranks",
        plots.idle_by_ranks(found) + f'<ul class="legend">{keys}</ul>',
        f"Share of all ranks' time spent waiting, {meet}, of the same packs on fewer ranks.",
    )


def _fill(found: Simulation) -> str:
    return _figure(
        "Fill against packer",
        plots.fill_by_packer(found),
        "Share of the packs' tokens that are data and not padding. What a packer gives up in fill "
        "it may win back in waiting: the table has tokens a second.",
    )


def _histograms(found: Simulation) -> str:
    return _figure(
        "Distribution of pack cost",
        plots.cost_histograms(found),
        "Packs by their time, LLM included; heights are logarithmic, so that the few costly packs "
        "that everybody waits for can be seen. The line is the mean.",
    )


# ---- tables and words ---------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _strategies(found: Simulation) -> str:
    heads = (
        *("strategy", "fill", "idle, lockstep", "idle, end of step", "step"),
        *("tokens a second", "against the present", "packs moved", "bytes moved"),
        *("exposed", "exposed with overlap", "gain if exposed", "gain with overlap"),
    )
    rows = [
        (
            words.STRATEGY[of.strategy],
            words.percent(of.fill, 2),
            words.percent(of.idle_lockstep),
            words.percent(of.idle_end),
            words.milliseconds(of.step_ms),
            words.tokens_per_s(of.tokens_per_s),
            *([words.gain(of.gain)] if of.strategy != "arrival" else ["the present"]),
            *(_moved(of) if of.traffic.moved_packs else ["0", *[""] * 5]),
        )
        for of in found.outcomes
    ]
    return f'<section class="wide"><h2>All strategies</h2>{_table(heads, rows)}</section>'


def _moved(of: Outcome) -> list[str]:
    return [
        f"{of.traffic.moved_packs:,.0f} ({words.percent(of.traffic.moved_share)})",
        decimal(round(of.traffic.moved_bytes)),
        words.milliseconds(of.exposed_ms),
        words.milliseconds(of.exposed_overlap_ms),
        words.gain(of.gain_exposed),
        words.gain(of.gain_overlap),
    ]


def _strategy_words(found: Simulation) -> str:
    items = "".join(
        f"<dt>{escape(words.STRATEGY[of.strategy])}</dt><dd>{escape(words.WHAT[of.strategy])}</dd>"
        for of in found.outcomes
    )
    return f'<section><h2>What is compared</h2><dl class="words">{items}</dl></section>'


def _sweep(report: Report) -> str:
    if not report.rows:
        return ""
    names = list(words.STRATEGY)
    heads = [words.SETTING[name] for name in report.options.sweep]
    heads += [f"idle, {words.STRATEGY[name]}" for name in names]
    heads += [
        f"fill, {words.PACKER[packer.packer]}" for packer in report.rows[0].simulation.packers
    ]
    heads += ["two-pass gains", "balanced gains"]
    rows = [
        [
            *(f"{value:,}" for value in row.values.values()),
            *(words.percent(row.simulation.outcome(name).idle_sync) for name in names),
            *(words.percent(packer.fill, 2) for packer in row.simulation.packers),
            *(words.gain(row.simulation.outcome(name).gain) for name in ("two_pass", "balanced")),
        ]
        for row in report.rows
    ]
    return f'<section class="wide"><h2>Sweep</h2>{_table(heads, rows)}</section>'


def _counts(found: Simulation) -> str:
    counted = words.counted(found.counts)
    if not counted:
        return ""
    rows = [(reason, f"{count:,}", sources) for reason, count, sources in counted]
    table = _table(("what happened", "samples", "of which sources"), rows)
    return f'<section class="wide"><h2>Samples not packed as they are</h2>{table}</section>'


def _assumptions(report: Report) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in words.assumptions(report))
    return (
        '<section class="wide"><h2>What the figures rest on</h2>'
        f'<ul class="words">{items}</ul></section>'
    )
