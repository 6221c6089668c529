"""`RebalancedLoader`: balance without the service, by exchanging packs between the ranks.

Invariants: each pack that the ranks' sources yield is yielded once, by one rank, in the global
batch it was read for; `state_dict` tells what was yielded, never what was read or exchanged ahead;
all ranks yield the same number of micro-batches and end together; `close` joins the one thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from dataservice.errors import ConfigError, DataServiceError, ResumeRefused
from trainer_client.batch import MicroBatch
from trainer_client.device import usable_device
from trainer_client.redistribute.ahead import Ahead, Waiting
from trainer_client.redistribute.exchange import PackExchange
from trainer_client.redistribute.placement import PlacementSettings
from trainer_client.redistribute.rebalancer import Produced, Rebalancer
from trainer_client.redistribute.shares import Cost, vision_cost

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceStats:
    """Counters of this rank since the loader was made."""

    batches: int
    waited_s: float
    """Seconds that the trainer waited for them."""
    moved_packs: int
    """Of the packs yielded, those that another rank had read."""
    moved_bytes: int
    dropped_packs: int
    """Read by this rank for a last global batch that was not whole."""


class RebalancedLoader:
    """Wraps any iterator of packs; iterate over it in place of that, on all ranks.

        with RebalancedLoader(packs, micro_steps=16) as loader:
            for batch in loader: ...

    For each global batch, every rank reads `micro_steps * packs_per_cell` packs from its own
    source, all ranks learn the costs of all, find the same placement (`dataservice.core.balance`)
    and exchange the packs that are not in place, micro-step by micro-step, while the trainer
    computes. The samples of the global batch stay the same, so the gradient does, as long as the
    loss is a sum over tokens divided by `meta["loss_tokens"]`.

        source          yields MicroBatches, of a PackStream with packs_per_cell=1 say, or dicts of
                        tensors and JSON values, such as a DataLoader's; iterated in another thread,
                        and nowhere else. Where it has state_dict and load_state_dict, so has this
        micro_steps, packs_per_cell
                        of what is yielded: the grid of a step. Several packs a cell are joined
                        along the token axis, so they must be canonical
        cost            of a pack, a whole number; default: the planner's vit_cost
        own_group       the data-parallel ranks, where they are not all: a process group made for
                        this loader alone (`dist.new_subgroups_by_enumeration(ranks, backend="gloo",
                        timeout=...)`; with device="cuda" of backend "cpu:gloo,cuda:nccl") and
                        destroyed by it. Default: all ranks, which make their loaders together
        device          where the tensors are when a batch is yielded. "cuda": packs go over NCCL,
                        from device to device, else over gloo. NCCL wants room on the device for
                        this exchange and the trainer's own collectives at once; where that is a
                        problem, leave the batches on the CPU
        overlap         False: read and exchange when the trainer asks, without a thread
        ahead           micro-batches kept ready
        ranks_per_node, sync_domain, tolerance
                        as in the service's config: ranks that share a node, among which a pack
                        counts as in place; ranks that meet at every micro-step, default all (1:
                        only at the end of a step); and the balance that may be given up to move
                        fewer packs
        remainder       what becomes of a last global batch that is not whole: filled up with
                        padding packs, or dropped
        timeout_s       how long the trainer waits for a batch, and a rank for the others

    Keys of `batch.meta` are those of a PackStream as far as the source gives them; step,
    micro_step, dp_rank, loss_tokens, num_images, ranks_without_images and waited_s are always
    there. Where the packs of a global batch are one whole step of the source, step and loss_tokens
    are that step's; otherwise steps are counted from 0, and loss_tokens are the labels that are not
    -100.

    An error of one rank's source is raised by all ranks, at the same step. A rank that ends or
    hangs is an error on the others, at once or after `timeout_s`.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        micro_steps: int,
        packs_per_cell: int = 1,
        cost: Cost = vision_cost,
        own_group: dist.ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        overlap: bool = True,
        ahead: int = 2,
        ranks_per_node: int = 1,
        sync_domain: int | None = None,
        tolerance: float = 0.01,
        remainder: Literal["pad", "drop"] = "pad",
        timeout_s: float = 300.0,
    ) -> None:
        if ahead < 1:
            raise ConfigError(f"ahead is {ahead}, must be at least 1; overlap=False keeps none")
        if remainder not in ("pad", "drop"):
            raise ConfigError(f'remainder is {remainder!r}, must be "pad" or "drop"')
        self._source, self._timeout_s = source, timeout_s
        self._depth = ahead if overlap else 0
        exchange = PackExchange(own_group, device=usable_device(device), timeout_s=timeout_s)
        settings = PlacementSettings(
            dp_size=exchange.size,
            micro_steps=micro_steps,
            packs_per_cell=packs_per_cell,
            ranks_per_node=ranks_per_node,
            sync_domain=sync_domain,
            tolerance=tolerance,
        )
        self._rebalancer = Rebalancer(
            source, exchange, settings=settings, cost=cost, remainder=remainder
        )
        self._items: Ahead[Produced] | Waiting[Produced] | None = None
        self._state: dict[str, Any] = {}
        self._closer = weakref.finalize(self, _shut_down, exchange, None, source, os.getpid())
        self._batches = self._moved_packs = self._moved_bytes = 0
        self._waited_s = 0.0

    # ---- batches --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        """The loader itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> MicroBatch:
        if not self._closer.alive:
            raise DataServiceError("the RebalancedLoader is closed")
        if self._items is None:
            self._start()
        assert self._items is not None
        made, waited_s = self._items.take()
        self._waited_s += waited_s
        if made is None:
            raise StopIteration
        batch = made.batch
        batch.meta["waited_s"] = waited_s
        if self._rebalancer.exchange.device.type == "cuda":
            consumer = torch.cuda.current_stream(self._rebalancer.exchange.device)
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(consumer)
        self._batches += 1
        self._moved_packs += made.moved_packs
        self._moved_bytes += made.moved_bytes
        self._state = {
            "version": STATE_VERSION,
            "source": made.source_state,
            "step": made.step,
            "micro_step": made.micro_step,
            "settings": self._rebalancer.settings.as_dict(),
        }
        return batch

    def _start(self) -> None:
        rebalancer = self._rebalancer
        exchange, name = rebalancer.exchange, f"rebalanced-loader-{rebalancer.exchange.rank}"
        if not self._depth:
            self._items = Waiting(rebalancer.produce())
            return
        self._items = Ahead(
            rebalancer.produce(),
            depth=self._depth,
            timeout_s=self._timeout_s,
            name=name,
            doing=lambda: rebalancer.doing,
        )
        self._closer.detach()
        self._closer = weakref.finalize(
            self, _shut_down, exchange, self._items, self._source, os.getpid()
        )

    def stats(self) -> RebalanceStats:
        return RebalanceStats(
            batches=self._batches,
            waited_s=self._waited_s,
            moved_packs=self._moved_packs,
            moved_bytes=self._moved_bytes,
            dropped_packs=self._rebalancer.dropped_packs,
        )

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread and the process groups. Idempotent.

        Ranks that stop at the same batch close without disturbing each other. A source that keeps
        the thread waiting is closed too, where it has `close`.
        """
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is: of this rank, since it holds the state of this rank's source.

        Before the first batch: the state that was loaded, or {} for the beginning. Taken inside a
        step it can be continued with the same number of ranks and the same settings only.
        """
        self._state_of_source("state_dict")
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start where `state` says; before the first batch. {} is the beginning."""
        load = self._state_of_source("load_state_dict")
        if self._items is not None:
            raise DataServiceError(
                "the RebalancedLoader has begun; load the state before the first batch"
            )
        if not state:
            return
        if state.get("version") != STATE_VERSION:
            raise ResumeRefused(
                f"the state has version {state.get('version')!r}, this loader reads version "
                f"{STATE_VERSION}; use the version that wrote it"
            )
        settings = self._rebalancer.settings.as_dict()
        if state["micro_step"] and state["settings"] != settings:
            raise ResumeRefused(
                f"the state is inside a step of {state['settings']}; it cannot go on with "
                f"{settings}: use the former, or a checkpoint taken between steps"
            )
        load(state["source"])
        self._rebalancer.step = state["step"]
        self._rebalancer.first_micro_step = state["micro_step"]
        self._state = dict(state)

    def _state_of_source(self, name: str) -> Any:
        method = getattr(self._source, name, None)
        if method is None:
            raise DataServiceError(
                f"the source, a {type(self._source).__name__}, has no {name}, so where it stands "
                "cannot be kept; wrap one that has, a PackStream or torchdata's StatefulDataLoader"
            )
        return method


def _shut_down(
    exchange: PackExchange, items: Ahead[Produced] | None, source: Any, pid: int
) -> None:
    if os.getpid() != pid:
        return
    try:
        if items is not None:
            items.close(getattr(source, "close", lambda: None))
    finally:
        exchange.close()
