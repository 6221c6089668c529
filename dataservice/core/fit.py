"""Fits the cost model to measured times: non-negative least squares that outliers barely move.

    t = patches * P + patches_squared * P2 + length_squared * L2 + constant

Where the vision part was timed by itself, its terms are fitted to its time and those of the rest to
the rest: with 500 rows that are 3 % off, the error of the vision terms falls from 14 % to 0.6 %
where vision is 5 % of the time, from 6 % to 0.6 % at 20 %, from 1.4 % to 0.8 % at half of it.

Invariants: no coefficient is negative; errors are relative, so short and long micro-batches count
alike; the error to expect is measured on rows that the fitted coefficients have not seen; equal
input gives equal output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.fitted import TERMS, FittedCost
from dataservice.core.order import permutation
from dataservice.errors import ConfigError

MIN_ROWS = 200
HUBER_ROUNDS = 5
HUBER = 1.345
OUTLIER = 3.5
"""Robust standard deviations from the fit beyond which a row is left out of the last round."""
FOLDS = 10
LEAST_VARIATION = 1e-3
"""Below it, relative to its size, a column is constant, or the same as others together."""
LEAST_GAIN = 0.95
"""A fit has to leave less than this of the error that one constant makes."""
LARGEST_TERM = 1e18
SECONDS = (1e-9, 1e9)
"""Within which a measured time has to be."""
_CONSTANT = len(TERMS)
_VISION = (0, 1)
"""Of TERMS, those of the vision part."""
_FS_PER_S = 10**15

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What the rows say; shares are relative to the predicted time."""

    patches_s: float
    """Seconds per patch, as the next three: 0 for a term that costs nothing or was dropped."""
    patches_squared_s: float
    length_squared_s: float
    constant_s: float
    num_rows: int
    num_outliers: int
    """Rows so far off that they are left out."""
    dropped: tuple[str, ...]
    """Terms that are the same in all rows: their time is in the constant."""
    error_median: float
    """How far single rows are from the prediction of a fit without them: half of them this far."""
    error_p90: float
    error_p99: float
    apart: bool
    """Whether the vision part's time was fitted by itself."""
    model_error_p99: float
    """The part of it that more rows would remove: standard error of the predicted time, p99."""

    @property
    def p_ref(self) -> float | None:
        """Patches at which an image's second term equals its first; None without a second."""
        return self.patches_s / self.patches_squared_s if self.patches_squared_s > 0 else None

    def to_cost(self) -> FittedCost:
        """To whole femtoseconds. ConfigError for coefficients out of range."""
        return FittedCost.of(
            patches_fs=round(self.patches_s * _FS_PER_S),
            patches_squared_fs=round(self.patches_squared_s * _FS_PER_S),
            length_squared_fs=round(self.length_squared_s * _FS_PER_S),
            constant_fs=round(self.constant_s * _FS_PER_S),
        )


def fit(
    patches: ArrayLike,
    patches_squared: ArrayLike,
    length_squared: ArrayLike,
    seconds: ArrayLike,
    vision_seconds: ArrayLike | None = None,
) -> Fit:
    """Fits one row per timed micro-batch; arrays [N], N >= 200; `vision_seconds` of `seconds`.

    The first round divides rows by the measured time, the others by the time predicted so far, for
    dividing by a noisy measurement makes a fit too low by twice the noise's variance. Five rounds
    weigh rows by Huber's rule with k = 1.345 * 1.4826 * median |relative residual|; a last one
    leaves out the outliers, whose bounded weight would still pull one way.
    ConfigError, for people, for too few rows, a time or term that cannot be, and rows that cannot
    tell the terms apart.
    """
    columns, times = _checked(patches, patches_squared, length_squared, seconds)
    kept = _varying(columns)
    dropped = tuple(name for i, name in enumerate(TERMS) if i not in kept)
    apart = vision_seconds is not None and {*_VISION} <= {*kept}
    if apart:
        vision = _checked_vision(vision_seconds, columns, times)
        shown = columns[:, 0] > 0
        _check_distinct(columns[shown][:, [*_VISION, _CONSTANT]] / vision[shown, None], _VISION)
        columns[:, [i for i in range(_CONSTANT) if i not in kept]] = 0
        kept = [*range(_CONSTANT)]
    else:
        vision = None
        _check_distinct(columns[:, [*kept, _CONSTANT]] / times[:, None], kept)
    used = columns[:, [*kept, _CONSTANT]]

    found, inliers = _solved(used, times, vision)
    held_out, refits = _cross_validated(used, times, vision)
    error = np.abs(times - held_out) / _scale(held_out, times)
    _check_follows(error, times)
    spread = np.sqrt(((refits - refits.mean(axis=0)) ** 2).sum(axis=0) * (FOLDS - 1) / FOLDS)
    quantiles = np.quantile(error, [0.5, 0.9, 0.99]).tolist()
    coefficients = np.zeros(len(TERMS) + 1)
    coefficients[[*kept, _CONSTANT]] = found
    a, b, c, d = coefficients.tolist()
    return Fit(
        patches_s=a,
        patches_squared_s=b,
        length_squared_s=c,
        constant_s=d,
        num_rows=len(times),
        num_outliers=int((~inliers).sum()),
        dropped=dropped,
        error_median=quantiles[0],
        error_p90=quantiles[1],
        error_p99=quantiles[2],
        apart=apart,
        model_error_p99=float(np.quantile(spread / _scale(used @ found, times), 0.99)),
    )


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 with the least |matrix @ x - target|; matrix [N, k] for a small k, x [k].

    Exact: the answer is the unconstrained least squares on the columns where it is not 0, so all
    2^k - 1 sets of columns are tried, on the k + 1 rows that a QR factorisation leaves.
    """
    width = np.linalg.norm(matrix, axis=0)
    width[width == 0] = 1.0
    factor = np.linalg.qr(np.column_stack([matrix / width, target]), mode="r")
    small: Floats = np.asarray(factor, dtype=np.float64)
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    least = float(np.linalg.norm(small[:, -1]))
    for size in range(1, num_columns + 1):
        for active in combinations(range(num_columns), size):
            columns = small[:, active]
            solved = np.linalg.lstsq(columns, small[:, -1], rcond=None)[0]
            distance = float(np.linalg.norm(columns @ solved - small[:, -1]))
            if (solved >= 0).all() and distance < least:
                least = distance
                best = np.zeros(num_columns)
                best[list(active)] = solved
    found: Floats = best / width
    return found


def _checked(
    patches: ArrayLike, patches_squared: ArrayLike, length_squared: ArrayLike, seconds: ArrayLike
) -> tuple[Floats, Floats]:
    """float64 [N, 4] of the three terms and 1, and the times [N]."""
    times = np.asarray(seconds, dtype=np.float64)
    terms = [
        np.asarray(values, np.float64) for values in (patches, patches_squared, length_squared)
    ]
    if any(values.shape != (times.size,) for values in (*terms, times)):
        raise ValueError("patches, patches_squared, length_squared and seconds differ in length")
    if times.size < MIN_ROWS:
        raise ConfigError(
            f"{times.size} rows are too few for a fit; time at least {MIN_ROWS} micro-batches"
        )
    for name, values in zip((*TERMS, "seconds"), (*terms, times), strict=True):
        least, most = SECONDS if name == "seconds" else (0.0, LARGEST_TERM)
        wrong = ~((values >= least) & (values <= most))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ConfigError(
                f"row {row}: {name}: {values[row]:g} should be from {least:g} to {most:g}; "
                "look at the unit, or leave the row out"
            )
    return np.column_stack([*terms, np.ones_like(times)]), times


def _checked_vision(vision_seconds: ArrayLike | None, columns: Floats, times: Floats) -> Floats:
    vision = np.asarray(vision_seconds, dtype=np.float64)
    if vision.shape != times.shape:
        raise ValueError("vision_seconds and seconds differ in length")
    shown = columns[:, 0] > 0
    wrong = ~((vision >= 0) & (vision < times)) | (shown & (vision < SECONDS[0]))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ConfigError(
            f"row {row}: vision_seconds: {vision[row]:g} should be above 0 and below the whole "
            f"time, {times[row]:g}; look at the unit, or leave the row out"
        )
    if shown.sum() < MIN_ROWS // 2:
        raise ConfigError(
            f"{shown.sum()} rows with images are too few to fit the vision part; time at least "
            f"{MIN_ROWS // 2} micro-batches with images"
        )
    return vision


def _varying(columns: Floats) -> list[int]:
    kept = [
        i
        for i in range(len(TERMS))
        if np.std(columns[:, i]) > LEAST_VARIATION * np.mean(columns[:, i])
    ]
    if not kept:
        raise ConfigError(
            f"{', '.join(TERMS)} are the same in all rows, so nothing can be told from them; "
            "time micro-batches of a real mix, with and without images"
        )
    return kept


def _check_distinct(matrix: Floats, terms: Sequence[int]) -> None:
    """ConfigError where a column, of a term or the constant (the last one), is within
    LEAST_VARIATION of a combination of the others."""
    names = [*(TERMS[i] for i in terms), "the constant"]
    unit = matrix / np.linalg.norm(matrix, axis=0)
    for i, name in enumerate(names):
        others = np.delete(unit, i, axis=1)
        part = np.linalg.lstsq(others, unit[:, i], rcond=None)[0]
        if np.linalg.norm(unit[:, i] - others @ part) < LEAST_VARIATION:
            named = np.delete(np.array(names), i)[np.abs(part) > np.abs(part).max() / 10]
            raise ConfigError(
                f"the rows cannot tell {name} from {' and '.join(named)}: one follows from the "
                "other in all of them; time micro-batches of other kinds too: images of many "
                "sizes, few and many images, short and long documents"
            )


def _check_follows(error: Floats, times: Floats) -> None:
    """ConfigError where one time for all rows predicts them as well as the terms do."""
    typical = np.full_like(times, np.median(times))
    constant = np.minimum(np.abs(times - typical) / _scale(typical, times), 1).mean()
    fitted = np.minimum(error, 1).mean()
    if fitted > LEAST_GAIN * constant:
        raise ConfigError(
            f"the times do not follow {', '.join(TERMS)}: rows are {fitted:.1%} off a prediction "
            f"on average, and {constant:.1%} off one constant; look whether they are compute "
            "times without waiting, each beside the terms of its own micro-batch"
        )


def _scale(predictions: Floats, times: Floats) -> Floats:
    """What a residual is relative to: the prediction, unless that is next to nothing."""
    return np.maximum(predictions, times / 10)


def _robust(columns: Floats, times: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """(coefficients [k], which rows are not outliers [N])."""
    scale = np.maximum(times, np.median(times) / 10)
    weights = np.ones_like(times)
    for _ in range(1 + HUBER_ROUNDS):
        rows = np.sqrt(weights) / scale
        found = nnls(columns * rows[:, None], times * rows)
        predictions = columns @ found
        scale = _scale(predictions, times)
        residuals = np.abs(times - predictions) / scale
        sigma = max(1.4826 * float(np.median(residuals)), 1e-12)
        weights = HUBER * sigma / np.maximum(residuals, HUBER * sigma)
    kept = residuals <= OUTLIER * sigma
    rows = kept / scale
    return nnls(columns * rows[:, None], times * rows), kept


def _solved(
    columns: Floats, times: Floats, vision: Floats | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """As `_robust`; with the time of the vision part, columns are all terms and the constant."""
    if vision is None:
        return _robust(columns, times)
    shown = columns[:, 0] > 0  # without images, the vision part has a blank one or none
    seen, seen_kept = _robust(columns[shown][:, [*_VISION, _CONSTANT]], vision[shown])
    rest, kept = _robust(columns[:, [len(_VISION), _CONSTANT]], times - vision)
    found = np.array([*seen[:-1], rest[0], 0.0])
    found[_CONSTANT] = max(0.0, float(np.median(times - columns @ found)))
    kept[shown] &= seen_kept
    return found, kept


def _cross_validated(
    columns: Floats, times: Floats, vision: Floats | None
) -> tuple[Floats, Floats]:
    """(each row predicted without it [N], all rows predicted without each fold [FOLDS, N])."""
    fold = permutation(len(times), 0, "fit folds") % FOLDS
    refits = []
    for i in range(FOLDS):
        rows = fold != i
        part = None if vision is None else vision[rows]
        refits.append(columns @ _solved(columns[rows], times[rows], part)[0])
    every = np.stack(refits)
    return every[fold, np.arange(len(times))], every
