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
    """Of the ranks of `own_group`, which is destroyed at the end; None: of all ranks, in a group
    that they make here together; without torch.distributed: of a rank alone.

    Numbers and headers go over gloo; payloads too where `device` is the CPU, else over NCCL, on the
    stream that is current when `payloads` is called.
    """

    def __init__(
        self, own_group: dist.ProcessGroup | None, *, device: torch.device, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self.device = device
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._group = own_group or _new_group(device, timeout_s)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def gather(self, row: NDArray[np.int64], *, what: str) -> NDArray[np.int64]:
        """[size, *row.shape]: the row of every rank; all have the same shape."""
        if self.size == 1:
            return row[None]
        own = torch.from_numpy(np.array(row)).reshape(-1)
        rows = torch.empty(self.size, len(own), dtype=torch.int64)
        with self._told(what) as group:
            self._wait(dist.all_gather(list(rows), own, group=group, async_op=True))
        return rows.numpy().reshape(self.size, *row.shape)

    def headers(
        self, outgoing: Sequence[bytes], incoming: Sequence[int], *, what: str
    ) -> list[bytes]:
        """Bytes for each rank for bytes of each rank, whose lengths are known."""
        send = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
        sizes = [len(part) for part in outgoing]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        with self._told(what) as group:
            self._wait(
                dist.all_to_all_single(
                    received,
                    send[: sum(sizes)],
                    list(incoming),
                    sizes,
                    group=group,
                    async_op=True,
                )
            )
        data, ends = received.numpy().tobytes(), np.cumsum(incoming)
        return [data[end - size : end] for end, size in zip(ends, incoming, strict=True)]

    def payloads(
        self, send: Bytes, outgoing: Sequence[int], incoming: Sequence[int], *, what: str
    ) -> Bytes:
        """`send` holds `outgoing[r]` bytes for each rank r in turn; the same of what came."""
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=self.device)
        with self._told(what) as group:
            self._wait(
                dist.all_to_all_single(
                    received, send, list(incoming), list(outgoing), group=group, async_op=True
                )
            )
        return received

    def close(self) -> None:
        """Ends what other ranks wait for from this one. Idempotent."""
        group, self._group = self._group, None
        # gone already where the trainer has destroyed all groups
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _wait(self, work: Any) -> None:
        # On a device the wait is the stream's, and its deadline that of the group.
        work.wait(timedelta(seconds=self.timeout_s)) if self.device.type == "cpu" else work.wait()

    @contextmanager
    def _told(self, what: str) -> Iterator[dist.ProcessGroup]:
        """The group, for a collective whose failure is told in words."""
        if self._group is None:
            raise DataServiceError("the RebalancedLoader is closed")
        try:
            yield self._group
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0].partition(". This is typically")[0]
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


def _new_group(device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    try:
        made: dist.ProcessGroup = dist.new_group(
            backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise DataServiceError(
            f"rank {dist.get_rank()} could not connect to the other ranks within {timeout_s:.3g} "
            "s; all ranks make their RebalancedLoader at the same point of the program, or pass "
            f"own_group ({error})"
        ) from error
    return made
