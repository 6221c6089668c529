"""The plots of a simulation as SVG: waiting by cell, idle share by ranks, fill, cost of packs.

Invariants: functions of a Simulation alone; every mark says its value when pointed at, every plot
what it shows to a screen reader; lines differ in shape and dash as well as in colour.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dataservice.cli import simulate_words as words
from dataservice.cli import svg
from dataservice.core.simulate import Simulation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_COLUMNS = 256
MOST_ROWS = 128
SHADES = 12
SHAPES = {
    "arrival": "circle",
    "local": "square",
    "budget_2d": "diamond",
    "nbin_v1": "up",
    "nbin_v2": "down",
    "two_pass": "left",
    "balanced": "right",
}
HISTOGRAMS = ("lbf", "budget_2d", "nbin_v1", "nbin_v2", "balanced")

# ---- heat map -----------------------------------------------------------------------------------


def ranks_a_column(ranks: int) -> int:
    return -(-ranks // MOST_COLUMNS)


def heat_map(found: Simulation, strategy: str) -> str:
    """Rows are micro-steps, columns ranks; a column of several ranks shows the slowest."""
    cells = found.cells_ms[strategy]
    shown = _columns(cells[:MOST_ROWS])
    low, high = shade_range(found)
    shades = _shades(shown, low, high)
    rows, columns = shown.shape
    layers = [
        svg.element("path", d=path, class_=f"q{shade}")
        for shade in range(SHADES)
        if (path := _runs(shades == shade))
    ]
    tips = [
        svg.element(
            "rect",
            svg.tip(_row_words(row, cells[row])),
            x=0.0,
            y=float(row),
            width=float(columns),
            height=1.0,
            class_="row",
        )
        for row in range(rows)
    ]
    waited = 1 - cells.sum() / cells.shape[1] / cells.max(axis=1).sum()
    return svg.element(
        "svg",
        *layers,
        *tips,
        class_="cells",
        viewBox=f"0 0 {columns} {rows}",
        preserveAspectRatio="none",
        role="img",
        style=f"height:{min(max(rows * 11, 110), 420)}px",
        aria_label=(
            f"Heat map of {words.STRATEGY[strategy]}: time of every rank in each of "
            f"{rows} micro-steps of the first step; {words.percent(waited)} of it is waiting "
            "in lockstep."
        ),
    )


def shade_range(found: Simulation) -> tuple[float, float]:
    """Milliseconds of the faintest and the strongest shade, the same for all heat maps."""
    low = min(float(cells.min()) for cells in found.cells_ms.values())
    high = max(float(cells.max()) for cells in found.cells_ms.values())
    return low, high


def shade_starts(low: float, high: float) -> list[float]:
    """Where each shade begins; they widen with the time, as the root of it is shaded evenly."""
    return [low + (high - low) * (shade / SHADES) ** 2 for shade in range(SHADES)]


def _shades(cells: Floats, low: float, high: float) -> Ints:
    share = (cells - low) / (high - low) if high > low else np.zeros_like(cells)
    return np.minimum((SHADES * np.sqrt(share)).astype(np.int64), SHADES - 1)


def _columns(cells: Floats) -> Floats:
    width = ranks_a_column(cells.shape[1])
    starts = np.arange(0, cells.shape[1], width)
    grouped: Floats = np.maximum.reduceat(cells, starts, axis=1)
    return grouped


def _runs(chosen: NDArray[np.bool_]) -> str:
    """Path of the chosen cells, one rectangle a run of neighbours in a row."""
    rows, columns = chosen.shape
    edges = np.zeros((rows, columns + 2), dtype=np.int8)
    edges[:, 1:-1] = chosen
    change = np.diff(edges, axis=1)
    row, start = np.nonzero(change == 1)
    _, stop = np.nonzero(change == -1)
    return "".join(
        f"M{x} {y}h{width}v1h-{width}z"
        for y, x, width in zip(row.tolist(), start.tolist(), (stop - start).tolist(), strict=True)
    )


def _row_words(row: int, times: Floats) -> str:
    slowest = int(times.argmax())
    mean, most = float(times.mean()), float(times.max())
    waiting = words.percent(1 - mean / most) if most > 0 else "0%"
    return (
        f"micro-step {row}: rank {slowest} takes {words.milliseconds(most)}, the mean rank "
        f"{words.milliseconds(mean)}; {waiting} waiting"
    )


# ---- idle share by ranks ------------------------------------------------------------------------


def idle_by_ranks(found: Simulation) -> str:
    width, height = 480.0, 330.0
    ranks = found.ranks
    highest = max(max(idle) for idle in found.idle_by_ranks.values())
    marks = svg.ticks(max(highest, 0.01))
    spread = math.log2(ranks[-1] / ranks[0]) or 1.0
    across = svg.Axis(low=-0.02 * spread, high=spread * 1.02, first=48, last=width - 12)
    up = svg.Axis(low=0, high=marks[-1], first=height - 46, last=14)
    grid = [_level(up.at(mark), 48, width - 8, words.percent(mark, 0)) for mark in marks]
    places = [across.at(math.log2(count / ranks[0])) for count in ranks]
    names = [
        svg.text(x, height - 26, f"{count:,}", anchor="middle")
        for x, count in zip(places, ranks, strict=True)
    ]
    lines = [
        _line(strategy, places, [up.at(share) for share in idle], ranks, idle)
        for strategy, idle in found.idle_by_ranks.items()
    ]
    ends = ", ".join(
        f"{words.STRATEGY[name]} {words.percent(idle[-1])}"
        for name, idle in found.idle_by_ranks.items()
    )
    return svg.picture(
        width,
        height,
        f"Idle share against the number of ranks, {ranks[0]} to {ranks[-1]}. At {ranks[-1]:,} "
        f"ranks: {ends}.",
        *grid,
        *names,
        svg.text((48 + width) / 2, height - 6, "ranks", anchor="middle", class_="axis"),
        *lines,
    )


def _line(
    strategy: str,
    places: list[float],
    heights: list[float],
    ranks: tuple[int, ...],
    idle: tuple[float, ...],
) -> str:
    points = list(zip(places, heights, strict=True))
    marks = [
        svg.marker(
            SHAPES[strategy],
            x,
            y,
            svg.tip(f"{words.STRATEGY[strategy]}, {count:,} ranks: {words.percent(share)} idle"),
        )
        for (x, y), count, share in zip(points, ranks, idle, strict=True)
    ]
    return svg.element("g", svg.polyline(points, "line"), *marks, class_=f"s-{strategy}")


def legend_mark(strategy: str) -> str:
    return svg.element(
        "svg",
        svg.polyline([(0, 7), (26, 7)], "line"),
        svg.marker(SHAPES[strategy], 13, 7),
        class_=f"key s-{strategy}",
        viewBox="0 0 26 14",
        aria_hidden="true",
    )


def _level(y: float, left: float, right: float, name: str) -> str:
    return svg.element("line", x1=left, x2=right, y1=y, y2=y, class_="grid") + svg.text(
        left - 6, y + 4.5, name, anchor="end"
    )


# ---- fill ---------------------------------------------------------------------------------------


def fill_by_packer(found: Simulation) -> str:
    width, row = 480.0, 34.0
    height = row * len(found.packers) + 8
    across = svg.Axis(low=0, high=1, first=92, last=width - 70)
    bars = []
    for place, packer in enumerate(found.packers):
        top = place * row + 8
        name, share = words.PACKER[packer.packer], words.percent(packer.fill, 2)
        size = {"y": top, "height": row - 14, "rx": 3.0}
        bars += [
            svg.text(84, top + 15, name, anchor="end"),
            svg.element("rect", x=92.0, width=across.last - 92, class_="track", **size),
            svg.element(
                "rect",
                svg.tip(
                    f"{name}: {share} full; {packer.num_packs:,} packs, "
                    f"{words.percent(1 - packer.fill, 2)} of them is padding"
                ),
                x=92.0,
                width=across.at(packer.fill) - 92,
                class_=f"bar {'ours' if packer.packer in ('lbf', 'balanced') else ''}".strip(),
                **size,
            ),
            svg.text(width - 64, top + 15, share, class_="value"),
        ]
    said = ", ".join(f"{words.PACKER[p.packer]} {words.percent(p.fill, 2)}" for p in found.packers)
    return svg.picture(width, height, f"Fill of packs by packer: {said}.", *bars)


# ---- distribution of cost -----------------------------------------------------------------------


def cost_histograms(found: Simulation) -> str:
    """One above the other, the share of packs on a logarithmic scale, so that tails are seen."""
    packers = [packer for packer in found.packers if packer.packer in HISTOGRAMS]
    width, row = 480.0, 96.0
    height = row * len(packers) + 46
    edges = found.edges_ms
    across = svg.Axis(low=0, high=float(edges[-1]), first=56, last=width - 14)
    most = max(packer.num_packs for packer in packers)
    marks = [mark for mark in svg.ticks(float(edges[-1]), 5) if mark <= edges[-1] * 1.001]
    unit, unit_ms = ("seconds", 1000) if edges[-1] >= 10_000 else ("milliseconds", 1)
    drawn = [
        _histogram(found, number * row, row, across, math.log10(0.5 / most), name)
        for number, name in enumerate(packer.packer for packer in packers)
    ]
    drawn += [
        svg.text(across.at(mark), height - 28, f"{mark / unit_ms:g}", anchor="middle")
        for mark in marks
    ]
    said = ", ".join(
        f"{words.PACKER[p.packer]}: costliest pack {p.cost_max:.1f} times the mean" for p in packers
    )
    return svg.picture(
        width,
        height,
        f"Distribution of pack times by packer. Vision cost: {said}.",
        *drawn,
        svg.text((56 + width) / 2, height - 6, f"{unit} a pack", anchor="middle", class_="axis"),
    )


def _histogram(
    found: Simulation, top: float, row: float, across: svg.Axis, lowest: float, name: str
) -> str:
    packer = next(p for p in found.packers if p.packer == name)
    up = svg.Axis(low=lowest, high=0, first=top + row - 8, last=top + 22)
    bars = [
        svg.element(
            "rect",
            svg.tip(
                f"{words.PACKER[name]}: {count:,} of {packer.num_packs:,} packs take "
                f"{words.milliseconds(start)} to {words.milliseconds(stop)}"
            ),
            x=across.at(start),
            y=(y := up.at(math.log10(count / packer.num_packs))),
            width=max(across.at(stop) - across.at(start) - 0.6, 0.6),
            height=up.first - y,
        )
        for start, stop, count in zip(
            found.edges_ms[:-1].tolist(),
            found.edges_ms[1:].tolist(),
            packer.histogram.tolist(),
            strict=True,
        )
        if count
    ]
    middle = across.at(packer.mean_ms)
    heading = f"{words.PACKER[name]}: vision cost at most {packer.cost_max:.1f} x the mean"
    levels = [
        _level(up.at(level), across.first, across.last, f"{100 * 10.0**level:g}%")
        for level in range(math.ceil(lowest), 1)
        if level % 2 == 0
    ]
    return svg.element(
        "g",
        *levels,
        *bars,
        svg.element("line", x1=middle, x2=middle, y1=up.last, y2=up.first, class_="mean"),
        svg.text(across.first, top + 13, heading),
        class_=f"histogram p-{name}",
    )
