"""What coordinator and planning process say to each other over a pipe, encoded by wire.schema."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataservice.wire.counting import CountBlock, CountedBlock, Roots
from dataservice.wire.messages import CursorState, StepSettings
from dataservice.wire.staging import ShardNeed


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Exactly one of the optional fields is set."""

    config: str | None = None
    """Open the index and the plan; answered by PlanInfo."""
    step: StepRequest | None = None
    """Answered by PlannedStep."""
    needs: NeedsRequest | None = None
    """Answered by LaneNeeds."""
    ahead: AheadRequest | None = None
    """Answered by `ahead`. This and the rest: of a lazy index only."""
    keep: KeepBlocks | None = None
    """Answered by BlocksKept."""
    count: CountHere | None = None
    """Answered by BlocksKept."""
    roots: str | None = None
    """Of the source of this name; answered by Roots."""


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
    counted: BlocksKept | None = None
    """Of a lazy index: what was counted to find lanes and windows."""


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
    settings: StepSettings = field(
        default_factory=lambda: StepSettings(pack_length=0, num_packs=())
    )
    next_step: StepSettings | None = None
    """Of the step at `next_cursor`; None: nothing is left for one."""
    pack_ids: tuple[str, ...] = ()
    """On the pipe this and `specs` follow in StepParts."""
    specs: tuple[bytes, ...] = ()
    """As `pack_specs.packed_spec` makes them."""
    sample_marks: bytes = b""
    """Little-endian uint32: `pack_specs.sample_mark` of each sample, pack by pack."""
    sample_counts: bytes = b""
    """Samples of each pack."""
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
    excluded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pack id -> hole keys of its samples that are left out, records and pictures."""
    steps_skipped: int = 0
    """That would have come before it."""
    samples_excluded: int = 0
    loss_tokens: int = 0
    lockstep_cost: int = 0
    lockstep_bound: int = 0
    lockstep_arrival: int = 0
    moved: int = 0
    moved_bytes: int = 0
    plan_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """Of some packs of a step, in its order."""

    pack_ids: tuple[str, ...]
    specs: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsRequest:
    cursor: CursorState
    windows_ahead: int
    counted_only: bool = False
    """With a lazy index: name of windows that are not all counted what is known without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneNeeds:
    """Shards by lane; next_use counts windows from the lane's current one."""

    lanes: tuple[tuple[ShardNeed, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadRequest:
    """Which blocks the windows from a cursor on need that are not counted yet."""

    cursor: CursorState
    windows_ahead: int
    most: int
    """Blocks in the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingBlocks:
    """In the order of need."""

    blocks: tuple[CountBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBlocks:
    """Counted by workers."""

    blocks: tuple[CountedBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountHere:
    """Blocks that the planning process is to count itself, by (file, block)."""

    keys: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksKept:
    blocks: int
    """That were not kept before."""
    rows: int
    """Records of these, and how many of them are rejected."""
    rejected: int
    failed: tuple[CountedBlock, ...] = ()
    """Those that could not be counted or kept, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFailed:
    kind: str
    """Name of the error class."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReply:
    """Exactly one field is set; `missing` in place of a step or needs that lack blocks."""

    info: PlanInfo | None = None
    step: PlannedStep | None = None
    parts: int = 0
    """Of the step; a StepPart each follows."""
    needs: LaneNeeds | None = None
    missing: MissingBlocks | None = None
    ahead: MissingBlocks | None = None
    kept: BlocksKept | None = None
    roots: Roots | None = None
    failed: PlanFailed | None = None
