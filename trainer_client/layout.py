"""Which data a process gets in a job that is parallel in several ways.

Invariants: a rank's place follows from its number, the sizes and their order alone; processes that
share a `dp_rank` are peers and get the same packs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.errors import ConfigError

MEGATRON_ORDER = "tp-cp-dp-pp"
"""Megatron-Core's: tensor parallel ranks are neighbours, pipeline stages are furthest apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """One process in a job of `dp * cp * tp * pp` processes.

    Expert parallelism takes its ranks from the others and changes nobody's data.
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

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if sorted(self.order.split("-")) != ["cp", "dp", "pp", "tp"]:
            raise ConfigError(
                f'order is "{self.order}": name dp, cp, tp and pp once each, joined by -'
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}, must be in 0..{self.world_size - 1}")

    @classmethod
    def data_parallel(cls, rank: int, size: int) -> ParallelLayout:
        """Every process has data of its own."""
        return cls(rank=rank, dp=size)

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
        stride = 1
        for name in self.order.split("-"):
            size: int = getattr(self, name)
            if name == dimension:
                return self.rank // stride % size
            stride *= size
        raise ConfigError(f'"{dimension}" is none of dp, cp, tp, pp')
