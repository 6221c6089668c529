"""The settings that decide a plan, as frozen values; `dataservice.config` builds them.

Invariants: the plan's digest covers all of them; shares and ratios are text, exact to the digit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dataservice.core.fitted import FittedCost
from dataservice.core.vision import VisionRules

Packer = Literal["next_fit", "best_fit", "lbf", "budget_2d", "nbin", "balanced"]
CostModel = Literal["vit_cost", "image_tokens", "fitted"]
Oversize = Literal["shrink", "truncate", "drop"]
Kind = Literal["text", "vision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    name: str
    weight: str | None = None
    """Exact decimal or fraction, such as "0.3" or "1/3"; endless runs only."""
    repeat: str = "1"
    """How often a finite run reads the source per epoch, an exact decimal or fraction."""
    mean_tokens: int | None = None
    """Of a sample, image tokens included; None = found from some samples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    sync_domain: int | None = None
    """Ranks that meet at every micro-step; None = the DP size."""
    tolerance: float = 0.01
    min_images_per_rank: int = 0
    """Cells with fewer images are avoided where they can be."""
    enabled: bool = True
    """False keeps arrival order: pack i goes to micro-step i // (R*k), rank (i // k) % R."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of windows, the same in every lane; what is None is as in PlanSettings."""

    windows: int | None = None
    """Of each lane. Every phase but the last gives this or `packs`."""
    vision_windows: int | None = None
    """With `windows` in a segregated plan, where `windows` are those of the text-only lanes."""
    packs: int | None = None
    """Alone: its length, turned into whole windows by the mean tokens of a sample, rounded up.
    With `windows`: the pack number of the plan at which the phase is cut, sooner where a segregated
    step would lose its mix; what its windows still hold is given up."""
    pack_length: int | None = None
    packer: Packer | None = None
    max_pixels: int | None = None
    """Of patches only."""
    max_tiles: int | None = None
    """Of tiles only."""
    weights: tuple[tuple[str, str], ...] | None = None
    """(source, weight) of every source that takes part; endless runs only."""

    def rules(self, vision: VisionRules) -> VisionRules:
        """The plan's, as they are in this phase."""
        limit = self.max_tiles if vision.mode == "tiles" else self.max_pixels
        return vision if limit is None else vision.with_limit(limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindShare:
    """What one kind of samples takes of every step of a segregated plan."""

    micro_steps: int
    """Relative to the other kind's: the trainer's micro_steps are divided in this proportion."""
    packs_per_cell: int = 1
    """Of a cell of this kind, times the trainer's."""
    weights: tuple[tuple[str, str], ...] | None = None
    """(source, weight); None = the sources' own. Endless runs only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segregation:
    """Text-only samples and those with images in packs and micro-steps of their own."""

    text: KindShare
    vision: KindShare


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    sources: tuple[SourceShare, ...]
    seed: int = 0
    pack_length: int = 8192
    align: int = 1
    """Every document of a pack begins at a multiple of it, and so does the padding behind the last
    one. It divides every pack_length."""
    packer: Packer = "balanced"
    open_bins: int = 32
    """For best_fit and nbin."""
    nbin_balance: Literal["image_tokens", "vit_cost"] = "image_tokens"
    """What nbin evens out: image tokens (v1) or the cost of `cost` (v2)."""
    llm_vit_ratio: str = "1"
    """For balanced: LLM time of a pack over the mean vision time of a pack, exact."""
    reference_ranks: int = 256
    """For balanced: the grid its packs are made for; any other gets the same packs. Made for few
    micro-steps they serve any grid; made for many they serve a grid of fewer badly."""
    reference_micro_steps: int = 4
    image_token_cap: int | None = None
    """Most image tokens of a pack; a single sample above it gets a pack of its own."""
    patch_cap: int | None = None
    """Most patches of a pack, likewise."""
    image_cap: int | None = None
    """Most images of a pack, likewise."""
    cost: CostModel = "vit_cost"
    p_ref: int = 4096
    fitted: FittedCost | None = None
    """For cost: fitted."""
    lanes: int | None = None
    """None = auto, which follows the first phase's sources and the longest pack_length of all
    phases. A run goes on only with the lanes and window it began with."""
    window: int | None = None
    """Samples a window and lane; None = auto, likewise."""
    segment: int = 64
    """Consecutive samples that stay together when a lane's range is shuffled."""
    open_segments: int = 8
    epochs: int | None = 1
    """Finite run over the sources by `repeat`; None = endless, by `weight`."""
    weight_by: Literal["samples", "tokens"] = "samples"
    oversize: Oversize = "shrink"
    """Of samples with images that are longer than a pack: shrink their images, truncate them at the
    end, or drop them. Text-only ones are split into pieces. All of it is counted."""
    remainder: Literal["pad", "drop"] = "pad"
    phases: tuple[Phase, ...] = ()
    """Empty: one, of the settings above."""
    segregate: Segregation | None = None
    vision: VisionRules = field(default_factory=VisionRules)
    balance: BalanceSettings = field(default_factory=BalanceSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The shape of a step: M = dp_size * micro_steps * packs_per_cell packs."""

    dp_size: int
    micro_steps: int
    packs_per_cell: int = 1

    @property
    def num_packs(self) -> int:
        return self.dp_size * self.micro_steps * self.packs_per_cell
