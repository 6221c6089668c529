"""The YAML file as pydantic models: the one place where outside settings are checked.

Invariants: what passes is complete and consistent, with the sources of a mixture file among the
others; every bound of a value stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dataservice.config.mixtures import expand_mixture
from dataservice.config.values import checked_take, exact, expand_path, parse_size, step_range
from dataservice.core.exclusions import sample_key
from dataservice.core.limits import LARGEST, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from dataservice.core.settings import (
    BalanceSettings,
    CostModel,
    Oversize,
    Packer,
    PlanSettings,
)
from dataservice.core.vision import VisionRules
from dataservice.masking import mask_urls
from dataservice.pipeline.text_settings import TEMPLATES, TextSettings
from dataservice.storage.records import RecordReader
from dataservice.storage.sources import Mismatch, RecordFormat

_PLAN = PlanSettings(sources=())
_VISION = VisionRules()
_BALANCE = BalanceSettings()
_TEXT = TextSettings()
WORKER_BYTES = 512 * 1024**2
"""Of memory that a worker takes beside the packs it holds, at least."""

# ---- values --------------------------------------------------------------------------------------


def _path(value: str, info: ValidationInfo) -> str:
    context: Mapping[str, str] = info.context or {}
    path = expand_path(value, context["base_dir"])
    if mask_urls(path) != path:
        raise ValueError(
            "this URL holds a credential, which would be written into the index; "
            "give it by the environment or fsspec's own config instead"
        )
    return path


def _tokenizer_file(value: str, info: ValidationInfo) -> str:
    return value if value == "bytes" else _path(value, info)


def _template(value: str, info: ValidationInfo) -> str:
    if value in TEMPLATES:
        return value
    path = _path(value, info)
    if "/" not in value and not value.endswith(".jinja"):
        raise ValueError(
            f"is none of {', '.join(TEMPLATES)}, nor the path of a .jinja file or a tokenizer's "
            "folder (write ./ before a folder's name)"
        )
    return path


def _none_if(word: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value == word else value)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Layout = Literal["auto", "llava", "messages", "text", "obelics", "mmc4", "finevision", "caption"]
PathStr = Annotated[str, AfterValidator(_path)]
PathList = Annotated[list[PathStr], BeforeValidator(_as_list)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Exact = Annotated[str, BeforeValidator(exact)]
Count = Annotated[int, Field(ge=1)]
TokenName = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AutoCount = Annotated[Count | None, _none_if("auto")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Means = Annotated[list[Finite], Field(min_length=3, max_length=3)]
Spreads = Annotated[list[Annotated[Finite, Field(gt=0)]], Field(min_length=3, max_length=3)]

# ---- sections ------------------------------------------------------------------------------------


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class BoundedSection(Section):
    """Its counts are at most what `core.limits` has for them."""

    @field_validator("*")
    @classmethod
    def _at_most(cls, value: object, info: ValidationInfo) -> object:
        most = LARGEST.get(info.field_name or "")
        if most is not None and isinstance(value, int) and value > most:
            raise ValueError(f"should be at most {most:,}")
        return value


class SourceSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    records: Annotated[PathList, Field(min_length=1)]
    images: PathList = []
    layout: Layout = "auto"
    placeholder: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(min_length=1)
    ] = ["<image>"]
    mismatch: Mismatch = "reject"
    fields: Annotated[dict[str, str], Field()] = {}
    roles: Annotated[dict[str, Literal["system", "user", "assistant", "tool"]], Field()] = {}
    data_uris: bool = False
    strip_prefix: str = ""
    add_prefix: str = ""
    take: Annotated[str, BeforeValidator(checked_take)] = "all"
    mean_tokens: Count | None = None
    weight: Exact | None = None
    repeat: Exact | None = None

    @property
    def format(self) -> RecordFormat:
        return RecordFormat(
            layout=self.layout,
            placeholders=tuple(self.placeholder),
            mismatch=self.mismatch,
            fields=tuple(self.fields.items()),
            roles=tuple(self.roles.items()),
            data_uris=self.data_uris,
        )

    @model_validator(mode="after")
    def _format_can_be_read(self) -> Self:
        if self.model_fields_set & {"placeholder", "fields", "roles"}:
            RecordReader(self.format)  # a ConfigError is a ValueError
        return self


class MixtureSection(Section):
    file: PathStr
    images: PathList = []
    strip_prefix: str = ""
    use: Annotated[list[str], BeforeValidator(_as_list)] = []


class TokenizerSection(Section):
    file: Annotated[str, AfterValidator(_tokenizer_file)] = "bytes"
    template: Annotated[str, AfterValidator(_template)] = _TEXT.template
    loss: Literal["assistant", "all"] = _TEXT.loss
    begin_of_text: TokenName | None = _TEXT.begin_of_text
    end_of_text: TokenName = _TEXT.end_of_text
    image_token: TokenName = _TEXT.image_token
    image_start: TokenName | None = _TEXT.image_start
    image_end: TokenName | None = _TEXT.image_end

    @property
    def settings(self) -> TextSettings:
        return TextSettings(tokenizer=self.file, **self.model_dump(exclude={"file"}))

    @model_validator(mode="after")
    def _different_tokens(self) -> Self:
        self.settings.check()
        return self


class VisionSection(BoundedSection):
    patch: Count = _VISION.patch
    merge: Count = _VISION.merge
    min_pixels: Count = _VISION.min_pixels
    max_pixels: Count = _VISION.max_pixels
    temporal_patch: Count = _VISION.temporal_patch
    mode: Literal["patches", "tiles"] = _VISION.mode
    tile: Count = _VISION.tile
    min_tiles: Count = _VISION.min_tiles
    max_tiles: Count = _VISION.max_tiles
    thumbnail: bool = _VISION.thumbnail
    tile_tokens: Count = _VISION.tile_tokens
    mean: Means = list(_VISION.mean)
    std: Spreads = list(_VISION.std)
    exact: bool = _VISION.exact
    background: Annotated[
        list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=3, max_length=3)
    ] = list(_VISION.background)
    icc: bool = _VISION.icc

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        if self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} is above max_tiles {self.max_tiles}")
        if self.mode == "tiles" and self.tile % self.patch:
            raise ValueError(f"tile {self.tile} is not a multiple of patch {self.patch}")
        if (self.patch * self.merge) ** 2 > self.max_pixels:
            raise ValueError(
                f"max_pixels {self.max_pixels} is less than one image token, "
                f"(patch {self.patch} x merge {self.merge})^2 pixels"
            )
        return self


Weights = Annotated[dict[str, Exact], Field(min_length=1)]


class PhaseSection(BoundedSection):
    packs: Count | None = None
    windows: Count | None = None
    vision_windows: Count | None = None
    pack_length: Count | None = None
    packer: Packer | None = None
    max_pixels: Count | None = None
    max_tiles: Count | None = None
    weights: Weights | None = None


class KindSection(BoundedSection):
    micro_steps: Count
    packs_per_cell: Count = 1
    weights: Weights | None = None


class SegregateSection(Section):
    text: KindSection
    vision: KindSection


class PlanSection(BoundedSection):
    seed: Annotated[int, Field(ge=0)] = _PLAN.seed
    pack_length: Count = _PLAN.pack_length
    align: Count = _PLAN.align
    packer: Packer = _PLAN.packer
    open_bins: Count = _PLAN.open_bins
    nbin_balance: Literal["image_tokens", "vit_cost"] = _PLAN.nbin_balance
    llm_vit_ratio: Exact = _PLAN.llm_vit_ratio
    reference_ranks: Count = _PLAN.reference_ranks
    reference_micro_steps: Count = _PLAN.reference_micro_steps
    image_token_cap: Count | None = _PLAN.image_token_cap
    patch_cap: Count | None = _PLAN.patch_cap
    image_cap: Count | None = _PLAN.image_cap
    cost: CostModel = _PLAN.cost
    p_ref: Count = _PLAN.p_ref
    cost_file: PathStr | None = None
    lanes: AutoCount = _PLAN.lanes
    window: AutoCount = _PLAN.window
    segment: Count = _PLAN.segment
    open_segments: Count = _PLAN.open_segments
    epochs: Annotated[Count | None, _none_if("endless")] = _PLAN.epochs
    weight_by: Literal["samples", "tokens"] = _PLAN.weight_by
    oversize: Oversize = _PLAN.oversize
    remainder: Literal["pad", "drop"] = _PLAN.remainder
    phases: list[PhaseSection] = []
    segregate: SegregateSection | None = None

    @model_validator(mode="after")
    def _packs_are_aligned(self) -> Self:
        for length in (self.pack_length, *(phase.pack_length for phase in self.phases)):
            if length is not None and length % self.align:
                raise ValueError(
                    f"align {self.align} does not divide pack_length {length}, and documents are "
                    "aligned to it: choose a multiple"
                )
        return self

    @model_validator(mode="after")
    def _cost_has_its_file(self) -> Self:
        if (self.cost == "fitted") != (self.cost_file is not None):
            raise ValueError(
                f"cost is {self.cost}, cost_file is {self.cost_file or 'null'}: give both "
                "`cost: fitted` and the file that `dataservice fit-cost` wrote, or neither"
            )
        return self


class BalanceSection(BoundedSection):
    enabled: bool = _BALANCE.enabled
    tolerance: Annotated[float, Field(ge=0, le=1)] = _BALANCE.tolerance
    min_images_per_rank: Annotated[int, Field(ge=0)] = _BALANCE.min_images_per_rank
    sync_domain: Annotated[Count | None, _none_if("dp")] = _BALANCE.sync_domain


class StagingSection(Section):
    cache_dir: PathStr | None = None
    budget_bytes: Size = 100 * 1000**3
    copy_streams: Annotated[int, Field(ge=1, le=256)] = 8
    max_bytes_per_s: Size | None = None
    deadline_s: Seconds = 30.0
    retries: Annotated[int, Field(ge=0)] = 3


class WorkersSection(Section):
    count: AutoCount = None
    min: Count = 1
    max: Count = 64
    autoscale: Literal[False, "cores", "nodes"] = "cores"
    decode_threads: AutoCount = None
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    ready_bytes: Size = 1024**3
    resource: Annotated[str, Field(min_length=1)] = "data_node"
    decode_deadline_s: Seconds = 20.0
    max_image_pixels: Count = MAX_IMAGE_PIXELS
    max_image_bytes: Size = MAX_IMAGE_BYTES
    memory_bytes: Size | None = 8 * 1024**3
    max_stuck_threads: Count = 4

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        if self.count is not None and not self.min <= self.count <= self.max:
            raise ValueError(f"count {self.count} is not between min {self.min} and max {self.max}")
        if self.autoscale == "nodes" and self.num_cpus == 0:
            raise ValueError(
                "num_cpus 0 with autoscale nodes: Ray adds nodes for the CPUs that workers "
                "reserve; give it what a worker keeps busy, such as 2.0"
            )
        least = self.ready_bytes + WORKER_BYTES
        if self.memory_bytes is not None and self.memory_bytes < least:
            raise ValueError(
                f"memory_bytes {self.memory_bytes} would end every worker: it must be at least "
                f"{least}, {WORKER_BYTES} more than ready_bytes {self.ready_bytes}; raise it, "
                "lower ready_bytes, or set it to null for no bound"
            )
        return self


class TlsSection(Section):
    cert_file: PathStr
    key_file: PathStr
    ca_file: PathStr | None = None
    mutual: bool = False
    server_name: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _mutual_has_its_ca(self) -> Self:
        if self.mutual and self.ca_file is None:
            raise ValueError("mutual: true needs ca_file: who signs the clients' certificates")
        return self


class ServingSection(Section):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    http_port: Annotated[int, Field(ge=0, le=65535)] | Literal["auto"] | None = "auto"
    plan_ahead_steps: Count = 8
    lease_s: Seconds = 2.0
    open_timeout_s: Seconds = 30.0
    tls: TlsSection | None = None
    token_file: PathStr | None = None
    insecure: bool = False


class ErrorsSection(Section):
    bad_image: Literal["hole", "fallback", "fail"] = "hole"
    max_hole_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_holes_in_a_row: Annotated[int, Field(ge=0)] = 100


class ExcludeSection(Section):
    from_step: Annotated[int, Field(ge=0)] | None = None
    samples: list[Annotated[str, AfterValidator(sample_key)]] = []
    steps: Annotated[tuple[int, int] | None, BeforeValidator(step_range)] = None

    @model_validator(mode="after")
    def _names_one_of_them(self) -> Self:
        if bool(self.samples) == (self.steps is not None):
            raise ValueError("give either samples, a list of sample keys, or steps, such as 10:20")
        if self.samples and self.from_step is None:
            raise ValueError(
                "samples need a from_step: the step from which on they are holes; 0 for a new run, "
                "else one that the run resumes at or comes to"
            )
        return self


class ConfigFile(Section):
    job: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    index_dir: PathStr
    index: Literal["full", "lazy"] = "full"
    state_dir: PathStr
    sources: list[SourceSection]
    mixture: Annotated[
        MixtureSection | None,
        BeforeValidator(lambda value: {"file": value} if isinstance(value, str) else value),
    ] = None
    tokenizer: TokenizerSection = TokenizerSection()
    vision: VisionSection = VisionSection()
    plan: PlanSection = PlanSection()
    balance: BalanceSection = BalanceSection()
    staging: StagingSection = StagingSection()
    workers: WorkersSection = WorkersSection()
    serving: ServingSection = ServingSection()
    errors: ErrorsSection = ErrorsSection()
    ranks_per_node: Annotated[int, Field(ge=0)] = 0
    exclude: list[ExcludeSection] = []

    @model_validator(mode="before")
    @classmethod
    def _mixture_gives_sources(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("mixture") is not None:
            return {"sources": [], **data}
        return data

    @model_validator(mode="after")
    def _with_mixture(self, info: ValidationInfo) -> Self:
        if self.mixture is not None:
            context: Mapping[str, str] = info.context or {}
            parts = expand_mixture(
                self.mixture.file,
                images=self.mixture.images,
                strip_prefix=self.mixture.strip_prefix,
                use=self.mixture.use,
                base_dir=context["base_dir"],
                endless=self.plan.epochs is None,
                weight_by=self.plan.weight_by,
            )
            sections = [SourceSection.model_validate(part, context=context) for part in parts]
            self.sources = [*self.sources, *sections]
        return self

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.sources:
            raise ValueError("sources: name at least one, or a mixture")
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sources: the name {twice[0]} stands here twice")
        endless = self.plan.epochs is None
        for i, source in enumerate(self.sources):
            if endless and source.repeat is not None:
                raise ValueError(
                    f"sources[{i}].repeat: counts in finite runs only; "
                    "give a weight instead, or set plan.epochs to a number"
                )
            if endless and source.weight is None and len(names) > 1:
                raise ValueError(f"sources[{i}].weight: is required in an endless run")
            if not endless and source.weight is not None:
                raise ValueError(
                    f"sources[{i}].weight: counts in endless runs only; "
                    "give repeat instead, or set plan.epochs: endless"
                )
        return self
