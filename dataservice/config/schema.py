"""The YAML file as pydantic models: the one place where outside settings are checked.

Invariants: an unknown key, a wrong type or an undefined environment variable is a ConfigError
that names file, line, full key and remedy, all of them in one go; no text shows a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from dataservice.config.values import exact, expand_path, masked, parse_size
from dataservice.core.limits import LARGEST
from dataservice.core.settings import (
    BalanceSettings,
    CostModel,
    Oversize,
    Packer,
    PlanSettings,
)
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

Key = tuple[str | int, ...]

_SHOWN_BITS = 1024
_PLAN = PlanSettings(sources=())
_VISION = VisionRules()
_BALANCE = BalanceSettings()

# ---- values --------------------------------------------------------------------------------------


def _path(value: str, info: ValidationInfo) -> str:
    context: Mapping[str, str] = info.context or {}
    return expand_path(value, context["base_dir"])


def _tokenizer_file(value: str, info: ValidationInfo) -> str:
    return value if value == "bytes" else _path(value, info)


def _none_if(word: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value == word else value)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


PathStr = Annotated[str, AfterValidator(_path)]
PathList = Annotated[list[PathStr], BeforeValidator(_as_list)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Exact = Annotated[str, BeforeValidator(exact)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AutoCount = Annotated[Count | None, _none_if("auto")]
Triple = Annotated[list[float], Field(min_length=3, max_length=3)]

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
    jsonl: Annotated[PathList, Field(min_length=1)]
    images: PathList = []
    layout: Literal["auto", "llava", "messages", "text"] = "auto"
    placeholder: Annotated[str, Field(min_length=1)] = "<image>"
    weight: Exact | None = None
    repeat: Exact | None = None


class TokenizerSection(Section):
    file: Annotated[str, AfterValidator(_tokenizer_file)] = "bytes"
    template: Literal["plain", "chatml"] = "chatml"
    loss: Literal["assistant", "all"] = "assistant"


class VisionSection(BoundedSection):
    patch: Count = _VISION.patch
    merge: Count = _VISION.merge
    min_pixels: Count = _VISION.min_pixels
    max_pixels: Count = _VISION.max_pixels
    temporal_patch: Count = _VISION.temporal_patch
    mean: Triple = list(_VISION.mean)
    std: Triple = list(_VISION.std)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
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
    deadline_s: Seconds = 30.0
    retries: Annotated[int, Field(ge=0)] = 3


class WorkersSection(Section):
    count: Count = 1
    min: Count = 1
    max: Count = 64
    decode_threads: Count = 2
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    ready_bytes: Size = 1024**3
    resource: Annotated[str, Field(min_length=1)] = "data_node"
    decode_deadline_s: Seconds = 20.0
    max_image_pixels: Count = 100_000_000

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.count <= self.max:
            raise ValueError(f"count {self.count} is not between min {self.min} and max {self.max}")
        return self


class ServingSection(Section):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    plan_ahead_steps: Count = 8
    lease_s: Seconds = 2.0
    open_timeout_s: Seconds = 30.0
    insecure: bool = False


class ErrorsSection(Section):
    max_hole_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_holes_in_a_row: Annotated[int, Field(ge=0)] = 100


class ConfigFile(Section):
    job: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    index_dir: PathStr
    state_dir: PathStr
    sources: Annotated[list[SourceSection], Field(min_length=1)]
    tokenizer: TokenizerSection = TokenizerSection()
    vision: VisionSection = VisionSection()
    plan: PlanSection = PlanSection()
    balance: BalanceSection = BalanceSection()
    staging: StagingSection = StagingSection()
    workers: WorkersSection = WorkersSection()
    serving: ServingSection = ServingSection()
    errors: ErrorsSection = ErrorsSection()
    ranks_per_node: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sources: the name {twice[0]} stands here twice")
        marks = sorted({s.placeholder for s in self.sources if s.layout != "text"})
        if len(marks) > 1:
            raise ValueError(
                f"sources: all sources with images share one placeholder, got {', '.join(marks)}; "
                "sources of text alone may say layout: text"
            )
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


# ---- from text to checked values -----------------------------------------------------------------


def parse_config(text: str, *, name: str, base_dir: str) -> ConfigFile:
    """`name` is the file's for error texts; relative paths are below `base_dir`. ConfigError."""
    lines: dict[Key, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _collect_lines(root, (), lines)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not a YAML file: {error}") from error
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    except _DuplicateKey as error:
        raise ConfigError(f"{name}:{error.line}: {error.key}: this key stands here twice") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}: should be a mapping of settings, such as 'job: my-run'")
    try:
        return ConfigFile.model_validate(data, context={"base_dir": base_dir})
    except ValidationError as error:
        problems = [_describe(detail, name, lines) for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from None


class _DuplicateKey(Exception):
    def __init__(self, key: str, line: int) -> None:
        self.key = key
        self.line = line
        super().__init__(key)


def _collect_lines(node: yaml.Node, key: Key, lines: dict[Key, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for name_node, value in node.value:
            child = (*key, str(name_node.value))
            line = name_node.start_mark.line + 1
            if child in lines:
                raise _DuplicateKey(_dotted(child), line)
            lines[child] = line
            _collect_lines(value, child, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*key, i)] = value.start_mark.line + 1
            _collect_lines(value, (*key, i), lines)


def _dotted(key: Key) -> str:
    """("sources", 0, "jsonl") as sources[0].jsonl."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def _describe(detail: ErrorDetails, name: str, lines: Mapping[Key, int]) -> str:
    key: Key = detail["loc"]
    shown = key
    while shown and shown not in lines:
        shown = shown[:-1]
    where = f"{name}:{lines[shown]}" if shown else name
    label = f"{_dotted(key)}: " if key else ""
    return f"{where}: {label}{_problem(detail, key)}"


def _problem(detail: ErrorDetails, key: Key) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key)
    if detail["type"] == "missing":
        return "this key is required"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    if isinstance(detail["input"], dict | list | BaseModel):
        return message
    named = next((str(part) for part in reversed(key) if isinstance(part, str)), "")
    given = masked(named, detail["input"])
    huge = isinstance(given, int) and given.bit_length() > _SHOWN_BITS
    return f"{masked(named, message)}, got {'a number too long to show' if huge else repr(given)}"


def _unknown_key(key: Key) -> str:
    known = list(_known_keys(_model_at(key[:-1])))
    close = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"unknown key; did you mean {_dotted((*key[:-1], close[0]))}?"
    everywhere: dict[str, str] = {}
    for path, leaf in _all_keys(ConfigFile):
        everywhere.setdefault(leaf, path)
    elsewhere = difflib.get_close_matches(str(key[-1]), everywhere, n=1, cutoff=0.8)
    hint = f"did you mean {everywhere[elsewhere[0]]}? " if elsewhere else ""
    return f"unknown key; {hint}Known here: {', '.join(known)}"


def _known_keys(model: type[BaseModel] | None) -> Iterator[str]:
    yield from model.model_fields if model else ()


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `annotation`, be it the annotation itself or a list of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)


def _model_at(key: Key) -> type[BaseModel] | None:
    model: type[BaseModel] | None = ConfigFile
    for part in key:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = _section_of(field.annotation) if field else None
    return model


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield prefix + name, name
        if section := _section_of(field.annotation):
            yield from _all_keys(section, f"{prefix}{name}.")
