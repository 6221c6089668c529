"""The settings that decide a plan, as frozen values built by config.py; the digest covers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dataservice.core.vision import VisionRules

Packer = Literal["next_fit", "best_fit", "lbf"]
CostModel = Literal["vit_cost", "image_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    name: str
    weight: str | None = None
    """Exact decimal or fraction, such as "0.3" or "1/3"; endless runs only."""
    repeat: str = "1"
    """How often a finite run reads the source per epoch, an exact decimal or fraction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    sync_domain: int | None = None
    """Ranks that meet at every micro-step; None = the DP size."""
    tolerance: float = 0.01
    enabled: bool = True
    """False keeps arrival order: pack i goes to micro-step i // (R*k), rank (i // k) % R."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    sources: tuple[SourceShare, ...]
    seed: int = 0
    pack_length: int = 8192
    packer: Packer = "lbf"
    open_bins: int = 32
    """For best_fit."""
    image_token_cap: int | None = None
    """Most image tokens of a pack; a single sample above it gets a pack of its own."""
    cost: CostModel = "vit_cost"
    p_ref: int = 4096
    lanes: int | None = None
    """None = auto."""
    window: int | None = None
    """Samples a window and lane; None = auto."""
    segment: int = 64
    """Consecutive samples that stay together when a lane's range is shuffled."""
    open_segments: int = 8
    epochs: int | None = 1
    """Finite run over the sources by `repeat`; None = endless, by `weight`."""
    weight_by: Literal["samples", "tokens"] = "samples"
    oversize: Literal["split"] = "split"
    """Text-only samples longer than a pack are split; those with images are dropped and counted."""
    remainder: Literal["pad", "drop"] = "pad"
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
