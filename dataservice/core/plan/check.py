"""What settings and grids must keep, checked before anything is planned.

Invariants: an error names the setting, its value and what it must be; what depends on the data is
checked where the data is looked at.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from dataservice.core.limits import (
    LARGEST,
    MAX_IMAGE_PATCHES,
    MAX_STEP_PACKS,
    MAX_TEXT,
    exact_fraction,
)
from dataservice.core.settings import (
    BalanceSettings,
    CostModel,
    Grid,
    KindShare,
    Oversize,
    Packer,
    Phase,
    PlanSettings,
)
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

_COUNTS = (
    "pack_length",
    "align",
    "open_bins",
    "reference_ranks",
    "reference_micro_steps",
    "image_token_cap",
    "patch_cap",
    "image_cap",
    "p_ref",
    "lanes",
    "window",
    "segment",
    "open_segments",
    "epochs",
)
_VISION_COUNTS = (
    "patch",
    "merge",
    "temporal_patch",
    "min_pixels",
    "max_pixels",
    "tile",
    "min_tiles",
    "max_tiles",
    "tile_tokens",
)
_KNOWN: dict[str, tuple[str, ...]] = {
    "packer": get_args(Packer),
    "nbin_balance": ("image_tokens", "vit_cost"),
    "cost": get_args(CostModel),
    "weight_by": ("samples", "tokens"),
    "oversize": get_args(Oversize),
    "remainder": ("pad", "drop"),
}


def no_step(settings: PlanSettings, grid: Grid) -> ConfigError:
    """What is said of a plan that ends before its first step."""
    return ConfigError(
        f"the plan has not one step of {grid.num_packs} packs: no sample fits plan.pack_length = "
        f'{settings.pack_length}, or the data is less than a step and plan.remainder is "drop" '
        f'(it is "{settings.remainder}")'
    )


def check_settings(settings: PlanSettings) -> None:
    for name in _COUNTS:
        _check_count("plan", name, getattr(settings, name))
    for name, values in _KNOWN.items():
        _known(f"plan: {name}", getattr(settings, name), values)
    _check_aligned(settings, "plan", settings.pack_length)
    _check_ratio(settings.llm_vit_ratio)
    _check_vision(settings.vision)
    if (settings.cost == "fitted") != (settings.fitted is not None):
        raise ConfigError(
            f"plan: cost is {settings.cost!r}, coefficients of a fit are "
            f"{'missing' if settings.fitted is None else 'given'}; `cost: fitted` needs a "
            "cost_file, and only it"
        )
    _check_balance(settings.balance)
    for number, phase in enumerate(settings.phases):
        _check_phase(settings, number, phase)
    _check_cuts(settings)
    if settings.segregate is not None:
        for kind, share in (
            ("text", settings.segregate.text),
            ("vision", settings.segregate.vision),
        ):
            _check_kind(settings, kind, share)


def kind_grids(settings: PlanSettings, grid: Grid) -> tuple[Grid, ...]:
    """What each stream fills of a step, in the order of micro-steps.

    ConfigError for sizes below 1, a DP size that the sync domain does not divide, and micro_steps
    that cannot be divided in the plan's proportion, and more packs than a step may have.
    """
    for name in ("dp_size", "micro_steps", "packs_per_cell"):
        _at_least_one(f"grid: {name}", getattr(grid, name))
    domain = settings.balance.sync_domain
    if domain is not None and grid.dp_size % domain:
        raise ConfigError(
            f"balance: sync_domain is {domain}, which does not divide the DP size, {grid.dp_size}; "
            "choose one that does, or another DP size"
        )
    check_step(grid)
    if settings.segregate is None:
        return (grid,)
    text, vision = settings.segregate.text, settings.segregate.vision
    common = math.gcd(text.micro_steps, vision.micro_steps)
    unit = (text.micro_steps + vision.micro_steps) // common
    times, rest = divmod(grid.micro_steps, unit)
    if rest:
        raise ConfigError(
            f"micro_steps is {grid.micro_steps}; the plan segregates {text.micro_steps} text to "
            f"{vision.micro_steps} vision micro-steps, so it must be a multiple of {unit}"
        )
    grids = tuple(
        Grid(
            dp_size=grid.dp_size,
            micro_steps=share.micro_steps // common * times,
            packs_per_cell=share.packs_per_cell * grid.packs_per_cell,
        )
        for share in (text, vision)
    )
    num_packs = sum(kind.num_packs for kind in grids)
    if num_packs > MAX_STEP_PACKS:
        raise ConfigError(
            f"dp_size {grid.dp_size} x micro_steps {grid.micro_steps} with the packs_per_cell of "
            f"plan.segregate is {num_packs} packs a step, more than {MAX_STEP_PACKS:,}; lower one "
            "of them"
        )
    return grids


def check_step(grid: Grid) -> None:
    """ConfigError for more packs a step than can be planned."""
    if grid.num_packs > MAX_STEP_PACKS:
        raise ConfigError(
            f"dp_size {grid.dp_size} x micro_steps {grid.micro_steps} x packs_per_cell "
            f"{grid.packs_per_cell} is {grid.num_packs} packs a step, more than "
            f"{MAX_STEP_PACKS:,}; lower one of them"
        )


def _at_least_one(what: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{what} is {value}; it must be at least 1")


def _check_count(where: str, name: str, value: int | None) -> None:
    _at_least_one(f"{where}: {name}", value)
    _not_above(f"{where}: {name}", value, LARGEST[name])


def _not_above(what: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise ConfigError(f"{what} is {value}; it must be at most {most:,}")


def _check_aligned(settings: PlanSettings, where: str, pack_length: int | None) -> None:
    if pack_length is not None and pack_length % settings.align:
        raise ConfigError(
            f"{where}: pack_length is {pack_length}; it must be a multiple of plan.align, "
            f"{settings.align}, to which documents are aligned"
        )


def _known(what: str, value: Any, values: tuple[str, ...]) -> None:
    if value not in values:
        raise ConfigError(f"{what} is {value!r}; it must be one of {', '.join(values)}")


def _check_ratio(text: str) -> None:
    where = f"plan: llm_vit_ratio is {text[:MAX_TEXT]!r}; it"
    try:
        ratio = exact_fraction(text)
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None
    if ratio <= 0:
        raise ConfigError(
            f'{where} must be an exact decimal or fraction above 0, such as "1.5" or "4/3"'
        )


def _check_vision(vision: VisionRules) -> None:
    _known("vision: mode", vision.mode, ("patches", "tiles"))
    for name in _VISION_COUNTS:
        _check_count("vision", name, getattr(vision, name))
    for name in ("min_pixels", "max_pixels"):
        _check_patches(f"vision: {name}", getattr(vision, name), vision)
    if vision.mode == "tiles":
        _check_tiles(vision)


def _check_tiles(vision: VisionRules) -> None:
    if vision.tile % vision.patch:
        raise ConfigError(
            f"vision: tile is {vision.tile}; it must be a multiple of patch, {vision.patch}, which "
            "is the side of the vision encoder's patches in it"
        )
    if vision.min_tiles > vision.max_tiles:
        raise ConfigError(
            f"vision: min_tiles is {vision.min_tiles}; it must be at most max_tiles, "
            f"{vision.max_tiles}"
        )
    patches = (vision.max_tiles + vision.thumbnail) * vision.row_patches
    if patches > MAX_IMAGE_PATCHES:
        raise ConfigError(
            f"vision: max_tiles is {vision.max_tiles}, {patches:,} patches of {vision.patch} x "
            f"{vision.patch} pixels; they must be at most {MAX_IMAGE_PATCHES:,}"
        )


def _check_patches(what: str, pixels: int | None, vision: VisionRules) -> None:
    most = MAX_IMAGE_PATCHES * vision.patch**2
    if pixels is not None and pixels > most:
        raise ConfigError(
            f"{what} is {pixels}, more than {MAX_IMAGE_PATCHES:,} patches of {vision.patch} x "
            f"{vision.patch} pixels; it must be at most {most:,}"
        )


def _check_balance(balance: BalanceSettings) -> None:
    _at_least_one("balance: sync_domain", balance.sync_domain)
    if balance.min_images_per_rank < 0:
        raise ConfigError(
            f"balance: min_images_per_rank is {balance.min_images_per_rank}; it must not be "
            "negative"
        )
    _not_above(
        "balance: min_images_per_rank",
        balance.min_images_per_rank,
        LARGEST["min_images_per_rank"],
    )
    if not 0 <= balance.tolerance < math.inf:
        raise ConfigError(
            f"balance: tolerance is {balance.tolerance}; it must be a share of at least 0, such as "
            "0.01"
        )


def _check_phase(settings: PlanSettings, number: int, phase: Phase) -> None:
    where = f"plan: phases[{number}]"
    for name in ("windows", "vision_windows", "packs", "pack_length", "max_pixels", "max_tiles"):
        _check_count(where, name, getattr(phase, name))
    _check_aligned(settings, where, phase.pack_length)
    _check_patches(f"{where}: max_pixels", phase.max_pixels, settings.vision)
    if phase.packer is not None:
        _known(f"{where}: packer", phase.packer, get_args(Packer))
    last = number + 1 == len(settings.phases)
    if last == (phase.windows is not None or phase.packs is not None):
        raise ConfigError(
            f"{where}: windows is {phase.windows} and packs is {phase.packs}; every phase but the "
            "last needs one of them, and the last, which goes on to the end, neither"
        )
    if (phase.vision_windows is not None) != (
        settings.segregate is not None and phase.windows is not None
    ):
        raise ConfigError(
            f"{where}: windows is {phase.windows} and vision_windows is {phase.vision_windows}; a "
            "segregated plan, whose kinds have windows of their own, takes both or neither, any "
            "other only windows"
        )
    _check_phase_images(settings.vision, where, phase)
    _check_weights(settings, where, phase.weights)


def _check_phase_images(vision: VisionRules, where: str, phase: Phase) -> None:
    other = "max_pixels" if vision.mode == "tiles" else "max_tiles"
    if getattr(phase, other) is not None:
        raise ConfigError(
            f"{where}: {other} is {getattr(phase, other)}, which says nothing where vision.mode is "
            f"{vision.mode}; give {'max_tiles' if other == 'max_pixels' else 'max_pixels'}"
        )
    for low, high in (("min_pixels", "max_pixels"), ("min_tiles", "max_tiles")):
        least, most = getattr(vision, low), getattr(phase, high)
        if most is not None and most < least:
            raise ConfigError(f"{where}: {high} is {most}, less than vision.{low} {least}")
    if phase.max_tiles is not None:
        _check_tiles(phase.rules(vision))


def _check_cuts(settings: PlanSettings) -> None:
    before = None
    for number, phase in enumerate(settings.phases):
        if phase.windows is None or phase.packs is None:
            continue
        if before is not None and phase.packs <= before[1]:
            raise ConfigError(
                f"plan: phases[{number}]: with windows, packs is the pack number of the plan at "
                f"which it is cut; {phase.packs} is not after phases[{before[0]}], which is cut at "
                f"{before[1]}"
            )
        before = (number, phase.packs)


def _check_kind(settings: PlanSettings, kind: str, share: KindShare) -> None:
    where = f"plan: segregate: {kind}"
    _check_count(where, "micro_steps", share.micro_steps)
    _check_count(where, "packs_per_cell", share.packs_per_cell)
    _check_weights(settings, where, share.weights)


def _check_weights(
    settings: PlanSettings, where: str, weights: tuple[tuple[str, str], ...] | None
) -> None:
    if weights is None:
        return
    if settings.epochs is not None:
        raise ConfigError(
            f"{where}: weights count in endless runs only (epochs: endless); "
            "a finite run follows sizes and repeat"
        )
    known = [source.name for source in settings.sources]
    for name, _ in weights:
        if name not in known:
            raise ConfigError(
                f"{where}: weights name {name!r}, the sources are {', '.join(sorted(known))}"
            )
