"""What the runs come to: a table a cell, and the figures that are aimed at."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from figures import Figure
from reports import aligned

from peers.corpus import Group
from peers.runs import Result
from peers.work import Column

LABELS = {
    "ours": "ours",
    "bare": "bare loop, 2 processes",
    "torch": "torch DataLoader",
    "torch-draft": "the same, Pillow's draft",
    "webdataset": "WebDataset",
    "streaming": "MosaicML Streaming",
    "energon": "Megatron Energon",
    "spdl": "SPDL",
}
TITLES: dict[Column, str] = {
    "same": "everyone with our decoder, exact, in order",
    "best": "everyone at their best",
}
SAME_TARGET = 1.2
BARE_TARGET = 0.95
SHIPPED_TARGETS = {"photos": 1.5, "all": 2.0}
AIMS = {"photos": 2.0, "all": 2.5}
NOT_SHIPPED = ("ours", "bare", "torch-draft")
HEAD = (
    *("", "samples/s", "images/s", "ours/it", "cores", "CPU ms/img", "MB", "first s", "start s"),
    *("fill", "runs"),
)


@dataclass(kw_only=True)
class Cell:
    """A column and a group, and what was measured in it."""

    column: Column
    group: Group
    results: dict[str, list[Result]] = field(default_factory=dict)
    pairs: dict[str, list[tuple[Result, Result]]] = field(default_factory=dict)
    """By loader: a run of it and the run of ours beside it."""
    failures: dict[str, str] = field(default_factory=dict)

    def rate(self, loader: str) -> float:
        return self.median(loader, lambda result: result.samples_per_s)

    def median(self, loader: str, value: Callable[[Result], float]) -> float:
        return statistics.median(map(value, self.results[loader]))

    def ratio(self, loader: str) -> float | None:
        """Ours over the loader, pair by pair; None without a pair."""
        pairs = self.pairs.get(loader, [])
        if not pairs:
            return None
        return statistics.median(ours.samples_per_s / it.samples_per_s for it, ours in pairs)

    def best_peer(self, leave_out: Sequence[str]) -> str | None:
        rates = {name: self.rate(name) for name in self.results if name not in leave_out}
        return max(rates, key=lambda name: rates[name]) if rates else None


def table(cell: Cell) -> str:
    group = cell.group
    order = sorted(cell.results, key=lambda name: -cell.rate(name))
    lines = [
        f"{TITLES[cell.column]}: {group.name}",
        f"{group.samples} samples, {group.images} images, {group.megapixels:.0f} megapixels, "
        f"{group.stored_bytes / 1e6:.0f} MB",
        *aligned([HEAD, *(_row(cell, name) for name in order)]),
        *(f"{LABELS[name]}: failed: {why}" for name, why in cell.failures.items()),
    ]
    return "\n".join(lines)


def _row(cell: Cell, name: str) -> Sequence[str]:
    ratio = cell.ratio(name)
    return (
        LABELS[name],
        f"{cell.rate(name):.1f}",
        f"{cell.median(name, lambda r: r.images_per_s):.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{cell.median(name, lambda r: r.cores):.2f}",
        f"{cell.median(name, lambda r: r.cpu_ms_per_image):.1f}",
        f"{max(r.peak_bytes for r in cell.results[name]) / 1e6:.0f}",
        f"{cell.median(name, lambda r: r.first_s):.2f}",
        f"{cell.median(name, lambda r: r.start_s):.1f}",
        f"{cell.median(name, lambda r: r.fill):.1%}",
        str(len(cell.results[name])),
    )


def figures(cells: Sequence[Cell]) -> list[Figure]:
    found = []
    for cell in cells:
        if cell.column == "best" and "bare" in cell.pairs:
            found.append(_figure(cell, "bare", BARE_TARGET, ""))
        leave_out = ("ours", "bare") if cell.column == "same" else NOT_SHIPPED
        peer = cell.best_peer(leave_out)
        if peer is None or cell.ratio(peer) is None:
            continue
        if cell.column == "same":
            found.append(_figure(cell, peer, SAME_TARGET, ""))
        else:
            name = cell.group.name
            found.append(_figure(cell, peer, SHIPPED_TARGETS[name], f"aim: {AIMS[name]:g}"))
    return found


def _figure(cell: Cell, peer: str, target: float, note: str) -> Figure:
    ratio = cell.ratio(peer)
    assert ratio is not None
    each = ", ".join(f"{o.samples_per_s / i.samples_per_s:.2f}" for i, o in cell.pairs[peer])
    return Figure(
        name=f"{TITLES[cell.column]}: {cell.group.name}: ours over {LABELS[peer]}",
        value=ratio,
        unit="times",
        target=f"at least {target:g}",
        reached=ratio >= target,
        note="; ".join(filter(None, [f"pairs: {each}", note])),
    )
