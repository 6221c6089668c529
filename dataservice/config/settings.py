"""The service's settings as frozen values, read from one YAML file.

Invariants: what `load_config` returns is complete and checked: paths absolute, variables expanded,
sizes in bytes; it survives `config_to_json` and back unchanged; printing it shows no secret.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dataservice.config.cost_file import load_cost_file
from dataservice.config.mixtures import named_sources
from dataservice.config.parsing import described, parse_config
from dataservice.config.schema import ConfigFile, SegregateSection, ServingSection, SourceSection
from dataservice.config.values import masked
from dataservice.core.exclusions import (
    ExcludedSample,
    Exclusions,
    SkippedSteps,
    exclusions,
)
from dataservice.core.settings import (
    BalanceSettings,
    KindShare,
    Phase,
    PlanSettings,
    Segregation,
    SourceShare,
)
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError
from dataservice.pipeline.text_settings import TextSettings
from dataservice.rpc.security import ServerSecurity, Tls
from dataservice.storage.sources import SourceFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingSettings:
    cache_dir: str | None
    """On every data node's own disk; None: nothing is staged, all reads go to the origin."""
    budget_bytes: int
    copy_streams: int
    """Ranges that one copy reads at once."""
    max_bytes_per_s: int | None
    """Of all copies of a node together; None: as fast as it goes."""
    deadline_s: float
    """Of one read from the origin."""
    retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    count: int | None
    """Until `dataservice scale` changes it within min and max. None: by the data nodes' cores, then
    as `autoscale` says."""
    min: int
    max: int
    autoscale: Literal[False, "cores", "nodes"]
    """How far the number follows what trainers wait for: not at all, as far as the cores of the
    data nodes go, or further, for Ray's autoscaler to add nodes."""
    decode_threads: int | None
    """None: the worker's share of its machine's cores."""
    num_cpus: float
    """That Ray reserves for one worker."""
    ready_bytes: int
    """Bound of the built packs that one worker holds."""
    resource: str
    """Ray custom resource that marks the data nodes."""
    decode_deadline_s: float
    """Of one picture; past it the picture becomes a hole."""
    max_image_pixels: int
    """Of one picture as stored; a larger one becomes a hole."""
    max_image_bytes: int
    """Of one picture's file; a larger one becomes a hole."""
    memory_bytes: int | None
    """Resident, of one worker; past it another takes its place. None: no bound."""
    max_stuck_threads: int
    """Decode threads that hang in a picture; at so many the worker is replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings:
    host: str
    port: int
    """Of the coordinator; 0 = any free one."""
    http_port: int | Literal["auto"] | None
    """Of the coordinator's status page and metrics; 0 = any free one, auto = port + 1, or any free
    one where port is 0; None = none."""
    plan_ahead_steps: int
    """How many steps any rank may lead the slowest."""
    lease_s: float
    """Workers and stagers silent for so long are taken for dead."""
    open_timeout_s: float
    """A rank that came and has not asked again for so long counts as missing."""
    tls: Tls | None
    token_file: str | None
    """Of the bearer token that every call must carry."""
    insecure: bool
    """Allows a host other than loopback, without TLS or token."""

    @property
    def security(self) -> ServerSecurity:
        return ServerSecurity(tls=self.tls, token_file=self.token_file, insecure=self.insecure)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPolicy:
    """What becomes of a picture that cannot be had, and when the job fails."""

    bad_image: Literal["hole", "fallback", "fail"]
    """A hole, a gray picture with its sample's labels kept, or the end of the job."""
    max_hole_share: float
    """Of the samples planned since the start."""
    max_holes_in_a_row: int
    """By pack number."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Config:
    job: str
    sources: tuple[SourceFiles, ...]
    text: TextSettings
    plan: PlanSettings
    index_dir: str
    index: Literal["full", "lazy"]
    """Whether everything is counted before training, or only what the plan is about to need."""
    state_dir: str
    staging: StagingSettings
    workers: WorkerSettings
    serving: ServingSettings
    errors: ErrorPolicy
    ranks_per_node: int
    """Trainer ranks that share a node with data; 0: data nodes hold no ranks."""
    exclude: Exclusions

    def __repr__(self) -> str:
        return f"Config({_masked_tree('', dataclasses.asdict(self))})"


_ADAPTER = TypeAdapter(Config)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Reads and checks a YAML file; ConfigError names file, line, key and remedy."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    base_dir = os.path.dirname(os.path.abspath(name))
    return _build(parse_config(text, name=name, base_dir=base_dir))


def load_mixture(path: str, *, images: Sequence[str] = ()) -> tuple[SourceFiles, ...]:
    """What a mixture file names, as sources; `images` are more places of theirs. Relative paths are
    below the file's folder, else below the working directory. Raises ConfigError."""
    context = {"base_dir": os.getcwd()}
    named = named_sources(os.path.abspath(path), images=images, base_dir=context["base_dir"])
    try:
        sections = [SourceSection.model_validate(source, context=context) for source in named]
    except ValidationError as error:
        raise described(error, path, {}) from None
    return tuple(map(_source_files, sections))


def config_to_json(config: Config) -> str:
    return _ADAPTER.dump_json(config).decode()


def config_from_json(text: str) -> Config:
    """The inverse of `config_to_json`, exactly; ConfigError for anything else."""
    try:
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, detail["loc"])) or "all" for detail in error.errors())
        raise ConfigError(
            f"the service's config as JSON does not fit this version (fields: {fields}); "
            "run the same version on every node"
        ) from None


def _build(file: ConfigFile) -> Config:
    return Config(
        job=file.job,
        sources=tuple(map(_source_files, file.sources)),
        text=file.tokenizer.settings,
        plan=_build_plan(file),
        index_dir=file.index_dir,
        index=file.index,
        state_dir=file.state_dir,
        staging=StagingSettings(**file.staging.model_dump()),
        workers=WorkerSettings(**file.workers.model_dump()),
        serving=_build_serving(file.serving),
        errors=ErrorPolicy(**file.errors.model_dump()),
        ranks_per_node=file.ranks_per_node,
        exclude=exclusions(
            (
                ExcludedSample(key=key, from_step=part.from_step or 0)
                for part in file.exclude
                for key in part.samples
            ),
            (
                SkippedSteps(start=max(part.steps[0], part.from_step or 0), stop=part.steps[1])
                for part in file.exclude
                if part.steps is not None
            ),
        ),
    )


def _build_serving(section: ServingSection) -> ServingSettings:
    tls = None if section.tls is None else Tls(**section.tls.model_dump())
    return ServingSettings(**section.model_dump(exclude={"tls"}), tls=tls)


def _source_files(source: SourceSection) -> SourceFiles:
    return SourceFiles(
        name=source.name,
        records=tuple(source.records),
        images=tuple(source.images),
        format=source.format,
        strip_prefix=source.strip_prefix,
        add_prefix=source.add_prefix,
        take=source.take,
    )


def _build_plan(file: ConfigFile) -> PlanSettings:
    endless = file.plan.epochs is None
    vision = file.vision
    return PlanSettings(
        sources=tuple(
            SourceShare(
                name=source.name,
                weight=(source.weight or "1") if endless else None,
                repeat=source.repeat or "1",
                mean_tokens=source.mean_tokens,
            )
            for source in file.sources
        ),
        vision=VisionRules(
            **vision.model_dump(exclude={"mean", "std", "background"}),
            mean=(vision.mean[0], vision.mean[1], vision.mean[2]),
            std=(vision.std[0], vision.std[1], vision.std[2]),
            background=(vision.background[0], vision.background[1], vision.background[2]),
        ),
        balance=BalanceSettings(**file.balance.model_dump()),
        fitted=None if file.plan.cost_file is None else load_cost_file(file.plan.cost_file),
        phases=tuple(
            Phase(**phase.model_dump(exclude={"weights"}), weights=_pairs(phase.weights))
            for phase in file.plan.phases
        ),
        segregate=_segregation(file.plan.segregate),
        **file.plan.model_dump(exclude={"cost_file", "phases", "segregate"}),
    )


def _segregation(section: SegregateSection | None) -> Segregation | None:
    if section is None:
        return None
    kinds = {
        name: KindShare(
            micro_steps=kind.micro_steps,
            packs_per_cell=kind.packs_per_cell,
            weights=_pairs(kind.weights),
        )
        for name, kind in (("text", section.text), ("vision", section.vision))
    }
    return Segregation(**kinds)


def _pairs(weights: dict[str, str] | None) -> tuple[tuple[str, str], ...] | None:
    return None if weights is None else tuple(sorted(weights.items()))


def _masked_tree(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _masked_tree(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked_tree(key, inner) for inner in value]
    return masked(key, value)
