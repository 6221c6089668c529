"""Which data a process gets in a job that is parallel in several ways.

Invariants: a rank's place follows from its number, the sizes and their order alone; processes that
share a `dp_rank` are peers and get the same packs; every process of a job works out the same
`readers` for each `dp_rank`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from dataservice.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEGATRON_ORDER = "tp-cp-dp-pp"
"""Megatron-Core's: tensor parallel ranks are neighbours, pipeline stages are furthest apart."""
DIMENSIONS = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """One process in a job of `dp * cp * tp * pp` processes.

    Expert parallelism takes its ranks from the others and changes nobody's data. ConfigError for
    sizes that do not fit.
    """

    rank: int = 0
    """Of this process in the whole job."""
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    order: str = MEGATRON_ORDER
    """The dimensions from the fastest changing to the slowest."""
    sequence_parallel: bool = False
    """Whether tensor parallel ranks split the sequence between them outside attention."""
    trainer_shares: tuple[str, ...] = ()
    """Of "tp", "cp", "pp": where the trainer itself hands batches on, as Megatron does along tp and
    pp. Only the first process along tp or cp reads then, and the first and last along pp."""
    ranks_per_host: int = 0
    """Ranks of one host, which are consecutive; 0: not known."""

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if sorted(self.order.split("-")) != sorted(DIMENSIONS):
            raise ConfigError(
                f'order is "{self.order}": name dp, cp, tp and pp once each, joined by -'
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}, must be in 0..{self.world_size - 1}")
        if (self.world_size // self.pp) % self.ep:
            raise ConfigError(
                f"ep is {self.ep}: must divide dp * cp * tp = {self.world_size // self.pp}, the "
                "ranks of a pipeline stage, from which expert parallelism takes its own"
            )
        if self.ranks_per_host < 0 or (
            self.ranks_per_host and self.world_size % self.ranks_per_host
        ):
            raise ConfigError(
                f"ranks_per_host is {self.ranks_per_host}: must divide the {self.world_size} ranks "
                "of the job, or be 0 where hosts have different numbers of them"
            )
        for name in self.trainer_shares:
            if name not in ("tp", "cp", "pp"):
                raise ConfigError(f'trainer_shares has "{name}": name tp, cp or pp')

    # ---- where it comes from --------------------------------------------------------------------

    @classmethod
    def data_parallel(cls, rank: int, size: int) -> ParallelLayout:
        """Every process has data of its own."""
        return cls(rank=rank, dp=size)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] = os.environ,
        *,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        order: str = MEGATRON_ORDER,
        sequence_parallel: bool = False,
    ) -> ParallelLayout:
        """Of a process that torchrun started: its RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

        `dp` is what the other sizes leave of WORLD_SIZE.
        """
        rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        others = cp * tp * pp
        if others < 1 or world % others:
            raise ConfigError(
                f"WORLD_SIZE is {world}: must be a multiple of cp * tp * pp = {others}"
            )
        local = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else 0
        return cls(
            rank=rank,
            dp=world // others,
            cp=cp,
            tp=tp,
            pp=pp,
            ep=ep,
            order=order,
            sequence_parallel=sequence_parallel,
            ranks_per_host=local if local and world % local == 0 else 0,
        )

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, *, ep: int = 1, sequence_parallel: bool = False
    ) -> ParallelLayout:
        """Of a mesh over all processes of the job, its dimensions named pp, dp, cp, tp.

        Dimensions that begin with "dp_", as dp_replicate and dp_shard, are neighbours and make up
        `dp` together.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise ConfigError(
                "the mesh has no mesh_dim_names: name its dimensions (pp, dp, cp, tp)"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise ConfigError(
                f"the mesh has ranks [{_listed(ranks)}]: give one over all ranks in their order, "
                "or make the ParallelLayout by hand"
            )
        sizes: dict[str, int] = {}
        last = ""
        for name, size in zip(names, mesh.mesh.shape, strict=True):
            kind = "dp" if name == "dp" or name.startswith("dp_") else name
            if kind not in DIMENSIONS or (kind in sizes and last != kind):
                raise ConfigError(
                    f"the mesh has dimensions {names}: name them pp, dp (or dp_replicate and "
                    "dp_shard beside each other), cp, tp, or make the ParallelLayout by hand"
                )
            sizes[kind] = sizes.get(kind, 1) * int(size)
            last = kind
        fastest_first = [*reversed(sizes), *(name for name in DIMENSIONS if name not in sizes)]
        return cls(
            rank=mesh.get_rank(),
            dp=sizes.get("dp", 1),
            cp=sizes.get("cp", 1),
            tp=sizes.get("tp", 1),
            pp=sizes.get("pp", 1),
            ep=ep,
            order="-".join(fastest_first),
            sequence_parallel=sequence_parallel,
        )

    @classmethod
    def from_megatron(
        cls, *, sequence_parallel: bool = False, trainer_shares: tuple[str, ...] = ("tp", "pp")
    ) -> ParallelLayout:
        """Of a process in which megatron.core.parallel_state has been initialised.

        The order is read off the process groups. Megatron reads on tensor parallel rank 0 of the
        first and last stage, hence `trainer_shares`; () where your loop reads on every rank.
        """
        import torch.distributed as dist

        state = import_module("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            raise ConfigError(
                "megatron.core.parallel_state is not initialised: call initialize_model_parallel "
                "before from_megatron"
            )
        groups = {
            "dp": state.get_data_parallel_group(),
            "cp": state.get_context_parallel_group(),
            "tp": state.get_tensor_model_parallel_group(),
            "pp": state.get_pipeline_model_parallel_group(),
        }
        members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        layout = cls(
            rank=dist.get_rank(),
            ep=state.get_expert_model_parallel_world_size(),
            order=_order_of(members),
            sequence_parallel=sequence_parallel,
            trainer_shares=trainer_shares,
            **{name: len(ranks) for name, ranks in members.items()},
        )
        for name, ranks in members.items():
            if list(layout.along(name)) != ranks:
                raise ConfigError(
                    f"Megatron's {name} group of rank {layout.rank} is [{_listed(ranks)}], which "
                    "no order of dp, cp, tp and pp gives: make the ParallelLayout by hand"
                )
        return layout

    # ---- places ---------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def dp_size(self) -> int:
        return self.dp

    @property
    def dp_rank(self) -> int:
        return self.place("dp")

    def place(self, dimension: str) -> int:
        """This process's number along "dp", "cp", "tp" or "pp"."""
        return self._place_of(self.rank, dimension)

    def along(self, dimension: str) -> tuple[int, ...]:
        """Ranks that differ from this process in `dimension` alone, itself among them."""
        stride = self._stride(dimension)
        first = self.rank - self.place(dimension) * stride
        return tuple(first + i * stride for i in range(getattr(self, dimension)))

    @property
    def is_first_stage(self) -> bool:
        return self.place("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.place("pp") == self.pp - 1

    # ---- peers ----------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that share this one's `dp_rank`, rising, itself among them."""
        place = self.dp_rank
        return tuple(rank for rank in range(self.world_size) if self._place_of(rank, "dp") == place)

    @property
    def reads(self) -> bool:
        """Whether this process reads a stream; False where the trainer gives it its batches."""
        return self.reads_at(self.rank)

    def reads_at(self, rank: int) -> bool:
        """Whether that one does."""
        for name in self.trainer_shares:
            place = self._place_of(rank, name)
            if place and not (name == "pp" and place == self.pp - 1):
                return False
        return True

    @property
    def readers(self) -> tuple[int, ...]:
        """Those of `peers` that read a stream."""
        return tuple(rank for rank in self.peers if self.reads_at(rank))

    @property
    def peer(self) -> int:
        """This process's number among `readers`. ConfigError where it does not read."""
        if not self.reads:
            raise ConfigError(
                f"rank {self.rank} is not to read: the trainer hands batches on along "
                f"{', '.join(self.trainer_shares)}; open streams where layout.reads is true, or "
                "leave trainer_shares empty"
            )
        return self.readers.index(self.rank)

    @property
    def host_peers(self) -> tuple[int, ...]:
        """Those of `peers` on this host; all that are known to be: itself where `ranks_per_host`
        is 0."""
        if not self.ranks_per_host:
            return (self.rank,)
        host = self.rank // self.ranks_per_host
        return tuple(rank for rank in self.peers if rank // self.ranks_per_host == host)

    # ---- what it asks of the plan ---------------------------------------------------------------

    @property
    def alignment(self) -> int:
        """Tokens of which each document of a pack must take a multiple: `plan.align`.

        Context parallelism cuts a document into 2 * cp parts and gives each rank one from either
        end, so that causal attention is even. With sequence parallelism a rank's share of it is
        divided by tp besides: lcm(2 * cp, cp * tp), and tp alone where cp is 1, as Megatron-Core
        pads (models/multimodal/context_parallel.py). 1 where nothing is needed.
        """
        shares = self.tp if self.sequence_parallel else 1
        if self.cp == 1:
            return shares
        return math.lcm(2 * self.cp, self.cp * shares)

    @property
    def sync_domain(self) -> int:
        """Consecutive DP ranks that wait for each other at every expert layer: a good value for
        `balance.sync_domain`. 1 without expert parallelism.

        As Megatron-Core makes expert groups when the experts are cut by tp as the rest is: of `ep`
        neighbours in cp and dp. Where experts are not cut, an expert group has fewer DP ranks.
        """
        dimensions = [name for name in self.order.split("-") if name in ("cp", "dp")]
        inner = self.cp if dimensions[0] == "cp" else 1
        outer = math.lcm(min(self.ep, self.cp * self.dp), inner) // inner
        return outer if self.dp % outer == 0 else self.dp

    # ---- arithmetic -----------------------------------------------------------------------------

    def _stride(self, dimension: str) -> int:
        stride = 1
        for name in self.order.split("-"):
            if name == dimension:
                return stride
            stride *= getattr(self, name)
        raise ConfigError(f'"{dimension}" is none of dp, cp, tp, pp')

    def _place_of(self, rank: int, dimension: str) -> int:
        size: int = getattr(self, dimension, 1)
        return rank // self._stride(dimension) % size


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name} is {value!r} in the environment: start the trainer with torchrun, or make the "
            "ParallelLayout by hand"
        )
    return int(value)


def _order_of(members: Mapping[str, Sequence[int]]) -> str:
    """Of dimensions whose groups have these ranks: the nearer they are, the faster it changes."""

    def stride(name: str) -> tuple[int, int]:
        ranks = members[name]
        distance = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        return distance, MEGATRON_ORDER.index(name)

    return "-".join(sorted(members, key=stride))


def named_ranks(ranks: Sequence[int]) -> str:
    """In words, as "ranks 0, 1": at most eight of them."""
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
