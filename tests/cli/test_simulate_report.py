"""The page of a simulation: complete, well-formed, self-contained and small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from support.simulation import random_report, random_simulation

from dataservice.cli import simulate_plots as plots
from dataservice.cli import svg
from dataservice.cli.simulate_report import page
from dataservice.cli.simulate_words import PACKER, REASON, STRATEGY, counted, milliseconds
from dataservice.core.settings import Grid
from dataservice.core.simulate import STRATEGIES
from dataservice.core.simulate.pool import PACKERS
from dataservice.core.tables import REASONS

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def pictures(html: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in SVG.findall(html)]


def test_every_name_has_words() -> None:
    assert list(STRATEGY) == list(STRATEGIES)
    assert list(PACKER) == list(PACKERS)
    assert list(REASON) == list(REASONS)
    assert list(plots.SHAPES) == list(STRATEGIES)


def test_the_page_needs_nothing_but_itself() -> None:
    html = page(random_report(Grid(dp_size=16, micro_steps=4)))
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\(", html)


def test_a_name_cannot_break_the_page() -> None:
    html = page(random_report(Grid(dp_size=8, micro_steps=2), workload="<b>&\"'"))
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html


def test_every_plot_is_well_formed_and_said_in_words() -> None:
    html = page(random_report(Grid(dp_size=16, micro_steps=4)))
    shown = [picture for picture in pictures(html) if picture.get("role") == "img"]
    assert len(shown) == 5  # two heat maps, idle share, fill, distribution
    for picture in shown:
        assert picture.get("aria-label")
        assert any(True for _ in picture.iter("title"))
    said = " ".join(picture.get("aria-label", "") for picture in shown)
    for name in STRATEGY.values():
        assert name in said


@pytest.mark.parametrize(
    "grid", [Grid(dp_size=1024, micro_steps=16), Grid(dp_size=600, micro_steps=200)]
)
def test_the_page_stays_small(grid: Grid) -> None:
    assert len(page(random_report(grid)).encode()) < 3_000_000


# ---- heat map -----------------------------------------------------------------------------------


def cells_by_shade(picture: ET.Element) -> dict[int, set[tuple[int, int]]]:
    """Shade -> the (row, column) that its rectangles cover."""
    found: dict[int, set[tuple[int, int]]] = {}
    for path in picture.iter("path"):
        cells = [
            (int(y), int(x) + i)
            for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path.get("d", ""))
            for i in range(int(width))
        ]
        assert len(cells) == len(set(cells))
        found[int(path.get("class", "")[1:])] = set(cells)
    return found


@pytest.mark.parametrize("ranks", [8, 300])
def test_a_heat_map_covers_every_cell_once_with_its_shade(ranks: int) -> None:
    found = random_simulation(Grid(dp_size=ranks, micro_steps=5), curve=False)
    width = plots.ranks_a_column(ranks)
    starts = np.array(plots.shade_starts(*plots.shade_range(found)))
    for strategy, cells in found.cells_ms.items():
        by_shade = cells_by_shade(ET.fromstring(plots.heat_map(found, strategy)))
        assert sum(map(len, by_shade.values())) == 5 * -(-ranks // width)
        for shade, places in by_shade.items():
            for row, column in places:
                slowest = cells[row, column * width : (column + 1) * width].max()
                assert np.searchsorted(starts, slowest + 1e-6, side="right") - 1 == shade


def test_rows_say_who_is_waited_for() -> None:
    found = random_simulation(Grid(dp_size=8, micro_steps=3), curve=False)
    picture = ET.fromstring(plots.heat_map(found, "arrival"))
    tips = [rect.findtext("title") or "" for rect in picture.iter("rect")]
    cells = found.cells_ms["arrival"]
    for row, tip in enumerate(tips):
        assert f"micro-step {row}: rank {cells[row].argmax()} takes" in tip
        assert milliseconds(cells[row].max()) in tip


# ---- parts --------------------------------------------------------------------------------------


def test_bars_are_as_long_as_packs_are_full() -> None:
    found = random_simulation(Grid(dp_size=8, micro_steps=3), curve=False)
    picture = ET.fromstring(plots.fill_by_packer(found))
    bars = [r for r in picture.iter("rect") if "bar" in r.get("class", "").split()]
    track = next(r for r in picture.iter("rect") if r.get("class") == "track")
    for bar, packer in zip(bars, found.packers, strict=True):
        share = float(bar.get("width", 0)) / float(track.get("width", 0))
        assert share == pytest.approx(packer.fill, abs=1e-3)


def test_lines_go_through_the_idle_shares() -> None:
    found = random_simulation(Grid(dp_size=64, micro_steps=4))
    picture = ET.fromstring(plots.idle_by_ranks(found))
    heights = {}
    for group in picture.iter("g"):
        line = group.find("polyline")
        assert line is not None
        points = line.get("points", "").split()
        heights[group.get("class", "")[2:]] = [float(p.split(",")[1]) for p in points]
    shares = np.array([found.idle_by_ranks[name] for name in heights])
    places = np.array(list(heights.values()))
    slope, start = np.polyfit(shares.ravel(), places.ravel(), 1)
    assert slope < 0
    assert np.abs(slope * shares + start - places).max() < 0.1


@pytest.mark.parametrize(
    ("high", "expected"),
    [(0.37, [0, 0.1, 0.2, 0.3, 0.4]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_highest(high: float, expected: list[float]) -> None:
    assert svg.ticks(high) == pytest.approx(expected)


def test_elements_are_escaped() -> None:
    made = svg.element("text", svg.tip("<a>&"), class_="x", stroke_width=1.5, data_x='"')
    assert made == (
        '<text class="x" stroke-width="1.5" data-x="&quot;"><title>&lt;a&gt;&amp;</title></text>'
    )


def test_counts_are_summed_by_reason() -> None:
    counts = {
        "web": {"split": 2, "shrunk": 1},
        "books": {"split": 5},
    }
    assert counted(counts) == [
        (REASON["split"], 7, "5 of books, 2 of web"),
        (REASON["shrunk"], 1, "1 of web"),
    ]
