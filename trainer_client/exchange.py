"""What the ranks of a group tell and send each other, each call with a deadline.

Invariants: the process groups are this object's own, so that no collective of the trainer is mixed
up with its; every rank makes the same calls in the same order; an error of one call ends all later
ones of every rank, by the deadline at the latest; `close` is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dataservice.errors import DataServiceError, DeadlineExceeded

Bytes = torch.Tensor
"""uint8 [n]"""


class PackExchange:
    """Made by all ranks of `group` at once (None: of the default group; without one: a rank alone).

    Numbers and headers go over gloo; payloads too where `device` is the CPU, else over NCCL, on the
    stream that is current when `payloads` is called.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, device: torch.device, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self.device = device
        self._groups: list[Any] = []
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        if self.size == 1:
            return
        backends = ["gloo"] if device.type == "cpu" else ["gloo", "nccl"]
        for backend in backends:
            made = dist.new_group(
                ranks,
                backend=backend,
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
            )
            self._groups.append(made)

    def gather(self, row: NDArray[np.int64], *, what: str) -> NDArray[np.int64]:
        """[size, *row.shape]: the row of every rank; all have the same shape."""
        if self.size == 1:
            return row[None]
        own = torch.from_numpy(np.ascontiguousarray(row)).reshape(-1)
        rows = torch.empty(self.size, len(own), dtype=torch.int64)
        with self._told(what):
            dist.all_gather(list(rows), own, group=self._group(0))
        return rows.numpy().reshape(self.size, *row.shape)

    def headers(
        self, outgoing: Sequence[bytes], incoming: Sequence[int], *, what: str
    ) -> list[bytes]:
        """Bytes for each rank for bytes of each rank, whose lengths are known."""
        send = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
        sizes = [len(part) for part in outgoing]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        with self._told(what):
            dist.all_to_all_single(
                received, send[: sum(sizes)], list(incoming), sizes, group=self._group(0)
            )
        data, ends = received.numpy().tobytes(), np.cumsum(incoming)
        return [data[end - size : end] for end, size in zip(ends, incoming, strict=True)]

    def payloads(
        self, send: Bytes, outgoing: Sequence[int], incoming: Sequence[int], *, what: str
    ) -> Bytes:
        """`send` holds `outgoing[r]` bytes for each rank r in turn; the same of what came."""
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=self.device)
        with self._told(what):
            work = dist.all_to_all_single(
                received,
                send,
                list(incoming),
                list(outgoing),
                group=self._group(-1),
                async_op=True,
            )
            work.wait()
        return received

    def close(self) -> None:
        """Ends what other ranks wait for from this one."""
        while self._groups:
            # gone already where the trainer has destroyed all groups
            if dist.is_initialized():
                dist.destroy_process_group(self._groups[-1])
            self._groups.pop()

    def _group(self, which: int) -> dist.ProcessGroup:
        if not self._groups:
            raise DataServiceError("the loader is closed")
        group: dist.ProcessGroup = self._groups[which]
        return group

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            if "timed out" in first_line.lower():
                raise DeadlineExceeded(
                    f"rank {self.rank} of {self.size} waited {self.timeout_s:.3g} s for {what}: a "
                    "rank that did not come to it stands in its source or has ended; its log says "
                    f"why ({first_line})"
                ) from error
            raise DataServiceError(
                f"rank {self.rank} of {self.size} lost another rank in {what}: it has ended or "
                f"closed its loader; its log says why ({first_line})"
            ) from error
