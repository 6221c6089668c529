"""What coordinator and planning process say to each other over a pipe, encoded by wire.schema."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataservice.wire.messages import CursorState, ShardNeed


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Exactly one of the optional fields is set."""

    config: str | None = None
    """Open the index and the plan; answered by PlanInfo."""
    step: StepRequest | None = None
    """Answered by PlannedStep."""
    needs: NeedsRequest | None = None
    """Answered by LaneNeeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInfo:
    digest: str
    phase_digests: tuple[str, ...]
    phase_windows: tuple[tuple[int, ...], ...]
    """By stream: first window of each phase."""
    stream_lanes: tuple[int, ...]
    """Lanes of each stream."""
    pack_length: int
    """The longest of the phases'."""
    num_lanes: int
    start: CursorState
    warnings: tuple[str, ...]
    num_samples: int
    vocab_size: int
    pad_token: int
    image_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    cursor: CursorState
    dp_size: int
    micro_steps: int
    packs_per_cell: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """Arrays hold one little-endian int64 a pack, M in all, in global pack order."""

    end: bool
    """True: nothing is left, the other fields are empty."""
    next_cursor: CursorState
    pack_length: int = 0
    pack_ids: tuple[str, ...] = ()
    specs: tuple[bytes, ...] = ()
    number: bytes = b""
    lane: bytes = b""
    micro_step: bytes = b""
    dp_rank: bytes = b""
    tokens: bytes = b""
    num_images: bytes = b""
    num_patches: bytes = b""
    cost: bytes = b""
    num_samples: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Source -> reason -> samples that were not packed as they are, of the windows that begin in
    this step."""
    loss_tokens: int = 0
    lockstep_cost: int = 0
    lockstep_bound: int = 0
    lockstep_arrival: int = 0
    moved: int = 0
    moved_bytes: int = 0
    plan_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsRequest:
    cursor: CursorState
    windows_ahead: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneNeeds:
    """Shards by lane; next_use counts windows from the lane's current one."""

    lanes: tuple[tuple[ShardNeed, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFailed:
    kind: str
    """Name of the error class."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReply:
    """Exactly one field is set."""

    info: PlanInfo | None = None
    step: PlannedStep | None = None
    needs: LaneNeeds | None = None
    failed: PlanFailed | None = None
