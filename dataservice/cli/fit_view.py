"""What `dataservice fit-cost` prints: coefficients, the error to expect, lines for the config.

Invariants: --json and the text say what one fit found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from dataservice.core.fit import Fit
from dataservice.core.fitted import FittedCost

COST_FILE = "cost.json"
"""The name in the config lines where --out gave none."""


def fit_object(fit: Fit, cost: FittedCost, out: str | None) -> dict[str, Any]:
    """The fit, its p_ref, the model's version and the file it was written to."""
    extras = {"p_ref": fit.p_ref, "version": cost.version, "cost_file": out}
    return dataclasses.asdict(fit) | extras


def fit_text(fit: Fit, cost: FittedCost, out: str | None) -> str:
    return "\n\n".join((_rows(fit), _coefficients(fit), _errors(fit), _config_lines(cost, out)))


def _rows(fit: Fit) -> str:
    lines = [f"{fit.num_rows:,} rows; {fit.num_outliers:,} of them left out as outliers"]
    if fit.apart:
        lines.append("the vision part was fitted to its own time, the rest to the rest")
    for name in fit.dropped:
        lines.append(f"{name} is the same in all rows: left out, its time is in the constant")
    return "\n".join(lines)


def _coefficients(fit: Fit) -> str:
    lines = [
        f"patches          {fit.patches_s * 1e6:10.4g} ms per 1,000 patches",
        f"patches_squared  {fit.patches_squared_s * 1e9:10.4g} ms per image of 1,000 patches",
        f"length_squared   {fit.length_squared_s * 1e9:10.4g} ms per document of 1,000 tokens",
        f"constant         {fit.constant_s * 1e3:10.4g} ms per micro-batch",
    ]
    if fit.p_ref:
        lines.append(
            f"p_ref            {fit.p_ref:10,.0f} patches, as plan.p_ref of vit_cost has it"
        )
    return "\n".join(lines)


def _errors(fit: Fit) -> str:
    half, most, nearly_all = fit.error_median, fit.error_p90, fit.error_p99
    return (
        "error to expect, on rows that the fit has not seen:\n"
        f"  a measured time   within {half:.1%} (half of the rows), {most:.1%} (90%), "
        f"{nearly_all:.1%} (99%)\n"
        f"  the model's part  within {fit.model_error_p99:.1%} (99%); more rows make it less"
    )


def _config_lines(cost: FittedCost, out: str | None) -> str:
    first = (
        f"wrote {out}, version {cost.version}; in the config, with the path from its folder:"
        if out
        else f"--out {COST_FILE} writes the model; then in the config:"
    )
    settings = {"plan": {"cost": "fitted", "cost_file": out or COST_FILE}}
    return first + "\n" + yaml.safe_dump(settings, sort_keys=False).rstrip()
