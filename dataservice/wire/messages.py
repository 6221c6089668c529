"""Every control message, as a frozen dataclass; strict on the way in, limits on every size.

Invariants: a message is a msgpack map of its field names; unknown, missing or wrongly typed
fields are refused (WireError names message and field); no ext types, no pickle.
Allowed field types: int, float, str, bytes, bool, X | None, tuple[X, ...], dict[str, X],
and other message dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.wire.counting import CountBlock, GetRoots, ReportCounts, Roots
from dataservice.wire.draining import Drain, Drained
from dataservice.wire.staging import PullStaging, RegisterStager, StagerRegistered, Staging

# ---- what a step looks like to a client ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlace:
    """One pack of a cell and where to fetch it."""

    pack_id: str
    number: int
    """Global pack number; -1 for a padding pack."""
    endpoint: str
    """Of the worker, "host:port". A padding pack comes from a worker like any other."""
    size_bytes: int
    """Estimate of its arrays' bytes, for the client's byte budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """`core.cursor.Cursor` and what the placement of the step depends on besides."""

    step: int
    phase: int
    phase_digest: str
    """Of the phase in the plan: what the packs from here on depend on, up to its end."""
    next_pack: tuple[int, ...]
    """Per stream of the plan, as is `next_lane`."""
    lanes: tuple[tuple[int, ...], ...]
    """Per lane (window, offset)."""
    next_lane: tuple[int, ...]
    lane_homes: tuple[int, ...]
    ranks_per_node: int = 0
    """0: data nodes hold no ranks."""
    excluded: str = ""
    """What was excluded of all that was handed out before, and of the step itself where it was
    begun, as `core.exclusions` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What a trainer may want to know of a step before it comes."""

    pack_length: int
    """Tokens of each of its packs."""
    num_packs: tuple[int, ...]
    """Of a cell, by micro-step."""
    max_pixels: int = 0
    """Of a picture; 0 where pictures are tiles."""
    max_tiles: int = 0
    """Of a picture, its thumbnail not counted; 0 where pictures are patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCells:
    """One rank's share of a step."""

    step: int
    cursor: CursorState
    """At the start of the step."""
    next_cursor: CursorState
    """At its end."""
    cells: tuple[tuple[PackPlace, ...], ...]
    """cells[micro_step] = its packs in order."""
    settings: StepSettings
    """Others in another phase of the plan."""
    next_step: StepSettings | None
    """Of the step behind it; None: this one is the last."""
    loss_tokens: int
    """Planned loss tokens of the whole step, all ranks."""
    num_images: tuple[int, ...]
    """Images of this rank's cell, by micro-step."""
    ranks_without_images: tuple[int, ...]
    """By micro-step."""


# ---- client <-> coordinator ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """What `PackStream.state_dict()` holds; everything before (step, micro_step) was yielded."""

    version: int
    job: str
    plan_digest: str
    decoder: str
    cursor: CursorState
    micro_step: int
    dp_size: int
    micro_steps: int
    packs_per_cell: int
    seal: str = ""
    """See `wire.states`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSession:
    job: str
    run_id: str
    dp_rank: int
    dp_size: int
    micro_steps: int
    packs_per_cell: int
    state: ResumeState | None
    """None: start at the beginning."""
    host: str
    wait_s: float
    peer: int = 0
    """Which of the processes that read for `dp_rank`."""
    peers: int = 1
    pid: int = 0
    """Of the process, which `host` and it tell from others at the same place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOpened:
    """`ready` false: other ranks are still missing (named); ask again."""

    ready: bool
    missing_ranks: tuple[int, ...] = ()
    waiting_for: str = ""
    """What keeps the session from opening when no rank is missing, in words."""
    session: int = 0
    """Generation number; grows with every new run."""
    plan_digest: str = ""
    first_step: int = 0
    first_micro_step: int = 0
    pack_length: int = 0
    """The longest of the plan's."""
    patch: int = 0
    merge: int = 0
    temporal_patch: int = 0
    tile: int = 0
    """Side of a tile in pixels; 0: pictures are patches, not tiles."""
    thumbnail: bool = False
    """Whether a picture of several tiles has one more, the last."""
    tile_tokens: int = 0
    """Image tokens of a tile."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    decoder: str = ""
    """What the bytes of the packs depend on besides the plan: the decoders' fingerprint and what
    is done about pictures that cannot be had."""
    vocab_size: int = 0
    pad_token: int = 0
    image_token: int = 0
    align: int = 1
    """Tokens; each document of a pack takes a multiple of it."""
    host_peers: tuple[int, ...] = (0,)
    """Peers of the same `dp_rank` that came from the same host, rising: the first fetches packs and
    hands them on to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GetSteps:
    session: int
    dp_rank: int
    first_step: int
    count: int
    done_step: int
    """Everything before (done_step, done_micro_step) was yielded to the trainer."""
    done_micro_step: int
    wait_s: float
    waited_s: float = 0.0
    """Seconds that the trainer waited since the last report."""
    waited_workers_s: float = 0.0
    """Of those, for packs from workers; not those before its first batch."""
    failed: tuple[str, ...] = ()
    """Endpoints that did not answer."""
    peer: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    steps: tuple[StepCells, ...]
    """May be fewer than asked for, or none: ask again."""
    end_step: int
    """First step that does not exist; -1 while unknown."""
    blocked_by: str = ""
    """Who keeps the next step from being handed out, in words; "" when nobody does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    session: int
    dp_rank: int
    done_step: int
    done_micro_step: int
    waited_s: float
    waited_workers_s: float = 0.0
    closing: bool = False
    peer: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ok:
    pass


# ---- worker <-> coordinator ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterWorker:
    worker_id: str
    node: str
    endpoint: str
    decoder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRegistered:
    lease: int
    """Lease number; every later call carries it, an older one is refused."""
    lease_s: float
    config: str
    """The service's config as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    sequence: int
    pack_id: str
    step: int
    micro_step: int
    dp_rank: int
    spec: bytes
    """A core.packspec.PackSpec, as actors.pack_specs packs it."""
    holes: dict[str, str]
    """Known holes among its samples: "<sample key>#<image number>" or "#record" -> reason."""
    storage_holes: bool
    """True once storage errors of this pack may become holes (it failed elsewhere too)."""
    isolated: bool = False
    """True: its pictures are decoded in a process of their own, because a worker that had the pack
    ended without a word."""
    takers: int = 1
    """So many peers will fetch it, one a host: it is kept until they have."""
    alone: bool = False
    """True: the worker says when it begins to build it, and builds no other such pack meanwhile,
    because isolation has not kept workers from ending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullWork:
    """Also the heartbeat."""

    worker_id: str
    lease: int
    session: int
    after_sequence: int
    wait_s: float
    ready_bytes: int
    ready_packs: int
    queued_packs: int
    built_packs: int
    """Counters since the start of the worker."""
    served_packs: int
    served_bytes: int
    decode_s: float
    read_origin_bytes: int
    read_staged_bytes: int
    images: int
    counting: tuple[tuple[int, ...], ...] = ()
    """(file, block) of each block that it has to count and has not reported."""
    storage_stalls: int = 0
    """Builds that failed because a read was given up at its deadline."""
    storage_retries: int = 0
    """Reads that failed in a way that may pass, and were tried again."""
    stuck_reads: int = 0
    """Reads past their deadline that have not come back yet."""
    stuck_decodes: int = 0
    """Decodes past their deadline that have not come back yet."""
    memory_bytes: int = 0
    """Resident memory of the worker's process."""
    retiring: str = ""
    """Why the worker wants to end, in words: its packs go to others at once; "" while it does
    not."""
    reach: tuple[str, ...] = ()
    """Ids of the packs that it builds, and of those that it may begin before it asks again."""
    busy_s: float = 0.0
    """Time that its packs were under build, all of them together."""
    decode_threads: int = 1
    """So many packs under build keep it busy."""
    returned: tuple[str, ...] = ()
    """Ids of packs that it was asked to give back: others are to build them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    session: int
    """When it differs from the worker's, the worker drops all packs of the older one."""
    assignments: tuple[Assignment, ...]
    held_step: int
    """Packs of steps before this one are needed by nobody."""
    cache_dir: str
    """Where the stager of the worker's node keeps its copies; "" while there is none."""
    drain: bool
    """True: build what is assigned, take no more, leave when served."""
    count: tuple[CountBlock, ...] = ()
    """Blocks of a lazy index, most urgent first."""
    give_back: int = 0
    """So many packs that it has not begun, and that nobody waits for, others are to build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GetAssignment:
    """For a pack that a client asked for and the worker does not know, or begins to build."""

    worker_id: str
    lease: int
    session: int
    pack_id: str
    begins: bool = False
    """Whether it is about to build it, alone: should it end meanwhile, this pack is blamed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportHoles:
    worker_id: str
    lease: int
    pack_id: str
    holes: dict[str, str]
    """Key to reason, of the new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HolesDecided:
    """All holes of the pack, key to reason: the first report of each won and is journalled."""

    holes: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFailed:
    worker_id: str
    lease: int
    session: int
    pack_id: str
    reason: str
    fatal: bool
    """True when another worker cannot do better, as with a shard that changed after indexing."""


# ---- operators ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GetStatus:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport:
    status: str
    """JSON, for people and the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleWorkers:
    workers: int
    """0: as many as trainers need, from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    before: int
    target: int
    reason: str = ""
    """For `target`, in words."""


# ---- client <-> worker --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPack:
    """Answered by a stream of frames, see wire.codec."""

    session: int
    pack_id: str
    dp_rank: int
    wait_s: float
    """How long the worker may take to build it before it answers DeadlineExceeded."""
    peer: int = 0


# ---- methods ------------------------------------------------------------------------------------

COORDINATOR_METHODS: dict[str, tuple[type, type]] = {
    "OpenSession": (OpenSession, SessionOpened),
    "GetSteps": (GetSteps, Steps),
    "ReportProgress": (Progress, Ok),
    "RegisterWorker": (RegisterWorker, WorkerRegistered),
    "PullWork": (PullWork, Work),
    "GetAssignment": (GetAssignment, Assignment),
    "ReportHoles": (ReportHoles, HolesDecided),
    "ReportPackFailed": (PackFailed, Ok),
    "ReportCounts": (ReportCounts, Ok),
    "GetRoots": (GetRoots, Roots),
    "RegisterStager": (RegisterStager, StagerRegistered),
    "PullStaging": (PullStaging, Staging),
    "GetStatus": (GetStatus, StatusReport),
    "Scale": (ScaleWorkers, Scaled),
    "Drain": (Drain, Drained),
}
"""Method of the coordinator's service -> (request, response). A request type names its method."""
