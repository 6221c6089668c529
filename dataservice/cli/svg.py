"""SVG as text: elements, linear axes and round ticks, without a plotting library.

Invariants: every text is escaped; numbers have at most two decimals; colours come from CSS classes
alone, so one drawing suits light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def element(name: str, *inside: str, **attributes: str | float) -> str:
    """`class_` is class, other underscores become hyphens; `inside` is markup already."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>" if inside else f"<{name}{written}/>"


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else number(value)


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str = "") -> str:
    attributes: dict[str, str | float] = {"x": x, "y": y, "text_anchor": anchor}
    if class_:
        attributes["class_"] = class_
    return element("text", escape(words), **attributes)


def tip(words: str) -> str:
    """What a pointer that rests on the shape shows."""
    return element("title", escape(words))


def picture(width: float, height: float, label: str, *inside: str, class_: str = "plot") -> str:
    """`label` is what a screen reader says."""
    return element(
        "svg",
        *inside,
        class_=class_,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=label,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Values low..high onto pixels first..last."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)


def ticks(high: float, most: int = 6) -> list[float]:
    """Round values from 0 to at least `high`, at most `most` + 1 of them."""
    if high <= 0:
        return [0.0, 1.0]
    rough = high / most
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def polyline(points: Sequence[tuple[float, float]], class_: str) -> str:
    return element(
        "polyline", points=" ".join(f"{number(x)},{number(y)}" for x, y in points), class_=class_
    )


def marker(shape: str, x: float, y: float, *inside: str) -> str:
    """A mark of about 9 pixels; shapes differ so that lines are told apart without colour."""
    if shape == "circle":
        return element("circle", *inside, cx=x, cy=y, r=4.2, class_="mark")
    corners = {
        "square": ((-3.9, -3.9), (3.9, -3.9), (3.9, 3.9), (-3.9, 3.9)),
        "diamond": ((0, -5.4), (5.4, 0), (0, 5.4), (-5.4, 0)),
        "up": ((0, -5), (4.8, 3.8), (-4.8, 3.8)),
        "down": ((0, 5), (4.8, -3.8), (-4.8, -3.8)),
        "left": ((-5, 0), (3.8, -4.8), (3.8, 4.8)),
        "right": ((5, 0), (-3.8, -4.8), (-3.8, 4.8)),
    }[shape]
    points = " ".join(f"{number(x + dx)},{number(y + dy)}" for dx, dy in corners)
    return element("polygon", *inside, points=points, class_="mark")
