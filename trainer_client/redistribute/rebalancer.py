"""Global batch after global batch: read, agree on a placement, exchange, one micro-batch at a time.

Invariants: all ranks make the same collective calls in the same order, whatever their sources do;
an error of one rank is told to all before the next placement; packs of the next global batch are
read between the micro-steps of this one, so a rank never holds more than two global batches' share.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dataservice.errors import ConfigError, DataServiceError, DeadlineExceeded, ResumeRefused
from dataservice.wire.schema import encode_plain
from trainer_client.batch import MicroBatch
from trainer_client.layout import named_ranks
from trainer_client.redistribute import flat
from trainer_client.redistribute.exchange import PackExchange
from trainer_client.redistribute.joining import join
from trainer_client.redistribute.placement import Column, Placement, PlacementSettings, place
from trainer_client.redistribute.shares import Cost, Fact, Share, SourceReader, padding_of

ERROR_BYTES = 1024
"""Of an error's text that other ranks are told."""
DEVICE_POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True, slots=True)
class Produced:
    """A micro-batch, and where its rank stands behind it."""

    batch: MicroBatch
    source_state: Any
    """Before the first pack of the global batch that comes next, or that is not at its end."""
    step: int
    micro_step: int
    moved_packs: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreed:
    placement: Placement
    headers: dict[int, bytes]
    """Of the packs that this rank gets from others."""
    step: int
    loss_tokens: int


class Rebalancer:
    """Makes the micro-batches of one rank. `produce` ends when the sources of all ranks have."""

    def __init__(
        self,
        source: Iterable[Any],
        exchange: PackExchange,
        *,
        settings: PlacementSettings,
        cost: Cost,
        remainder: Literal["pad", "drop"],
    ) -> None:
        self.exchange, self.settings, self.remainder = exchange, settings, remainder
        self.step = self.first_micro_step = 0
        self.doing = "not started"
        """In words, for whoever waits."""
        self.dropped_packs = 0
        self._reader = SourceReader(
            source, cost=cost, packs_per_rank=settings.packs_per_rank, pads=remainder == "pad"
        )
        self._send = torch.empty(0, dtype=torch.uint8, device=exchange.device)
        on_gpu = exchange.device.type == "cuda"
        self._stream = torch.cuda.Stream(exchange.device) if on_gpu else None

    def produce(self) -> Iterator[Produced]:
        """Micro-batches in order. Whatever goes wrong here ends the other ranks' waits as well."""
        try:
            self._check_settings()
            share = self._begin()
            self._read(share, self.settings.packs_per_rank)
            while (agreed := self._agree(share)) is not None:
                following = self._begin()
                for micro_step in range(self.first_micro_step, self.settings.micro_steps):
                    yield self._micro_batch(agreed, micro_step, share, following)
                    self._read(following, self.settings.packs_per_cell)
                self._read(following, self.settings.packs_per_rank)
                share, self.step, self.first_micro_step = following, agreed.step + 1, 0
        except GeneratorExit:
            raise
        except BaseException:
            self.exchange.close()
            raise

    def _begin(self) -> Share:
        return self._reader.begin()

    def _read(self, share: Share, count: int) -> None:
        self.doing = f"reading packs from its source (step {self.step})"
        with self._on_stream():
            self._reader.read(share, count)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # ---- agreeing -------------------------------------------------------------------------------

    def _agree(self, share: Share) -> _Agreed | None:
        """Where the packs of all ranks go; None where there is none, or too few to be computed."""
        settings = self.settings
        what = f"the costs of step {self.step} of all ranks"
        self.doing = f"waiting for {what}"
        gathered = self.exchange.gather(self._numbers(share), what=what)
        facts = gathered[:, : len(Fact)]
        self._check(facts, share)
        table = gathered[:, len(Fact) :].reshape(settings.dp_size, -1, len(Column))
        num_packs = int(facts[:, Fact.PACKS].sum())
        is_whole = num_packs == settings.dp_size * settings.packs_per_rank
        if num_packs == 0 or (self.remainder == "drop" and not is_whole):
            self.dropped_packs = len(share.packs)
            return None
        self.doing = f"placing the packs of step {self.step}"
        placement = place(facts[:, Fact.PACKS], table[:, 1:], table[:, 0], settings)
        sources = facts[:, [Fact.SOURCE_STEP, Fact.SOURCE_LOSS_TOKENS]]
        one_step = sources[0, 0] >= 0 and not _unlike_first(sources)
        return _Agreed(
            placement=placement,
            headers=self._exchange_headers(placement, share),
            step=int(sources[0, 0]) if one_step else self.step,
            loss_tokens=int(sources[0, 1])
            if one_step
            else int(placement.columns[:, Column.LABELLED].sum()),
        )

    def _check_settings(self) -> None:
        """By itself and first: on the settings depends how many numbers the ranks tell later."""
        what = "the settings of all ranks"
        self.doing = f"waiting for {what}"
        agreed_on = encode_plain([self.settings.as_dict(), self.remainder], what="settings")
        checksum = np.array([zlib.crc32(agreed_on)], np.int64)
        if other := _unlike_first(self.exchange.gather(checksum, what=what)):
            raise ConfigError(
                f"the RebalancedLoader of {named_ranks(other)} has other settings than that of "
                f"rank 0; those of rank {self.exchange.rank} are {self.settings.as_dict()} and "
                f'remainder "{self.remainder}"; give all ranks the same'
            )

    def _numbers(self, share: Share) -> NDArray[np.int64]:
        facts = {Fact.STEP: self.step, Fact.MICRO_STEP: self.first_micro_step}
        return self._reader.numbers(share, facts)

    def _check(self, facts: NDArray[np.int64], share: Share) -> None:
        """The same outcome on every rank: all raise, or none does."""
        failed = np.flatnonzero(facts[:, Fact.FAILED]).tolist()
        if failed:
            self._raise_failed(failed, share.error)
        if other := _unlike_first(facts[:, [Fact.STEP, Fact.MICRO_STEP]]):
            places = [
                f"rank {rank} at step {facts[rank, Fact.STEP]} micro-step "
                f"{facts[rank, Fact.MICRO_STEP]}"
                for rank in (0, other[0])
            ]
            raise ResumeRefused(
                f"{' and '.join(places)} would go on together; load the same checkpoint on every "
                "rank"
            )

    def _raise_failed(self, failed: list[int], own: Exception | None) -> None:
        text = "" if own is None else f"{type(own).__name__}: {own}"
        cut = text.encode()[:ERROR_BYTES].ljust(ERROR_BYTES)
        texts = self.exchange.gather(np.frombuffer(cut, np.int64), what="what went wrong")
        if own is not None:
            raise own
        why = texts[failed[0]].tobytes().decode(errors="replace").strip()
        raise DataServiceError(
            f"{named_ranks(failed)} could not read packs of step {self.step}, so no rank can go "
            f"on; rank {failed[0]}: {why}"
        )

    # ---- exchanging -----------------------------------------------------------------------------

    def _exchange_headers(self, placement: Placement, share: Share) -> dict[int, bytes]:
        """Of all packs of the micro-steps to come that this rank gets from others."""
        me, steps = self.exchange.rank, range(self.first_micro_step, self.settings.micro_steps)
        if not any(placement.moves(step) for step in steps):
            return {}
        sizes = placement.columns[:, Column.HEADER_BYTES]
        sent = _by_rank([placement.sent(step, me) for step in steps])
        came = _by_rank([placement.received(step, me) for step in steps])
        what = f"the headers of step {self.step}"
        self.doing = f"exchanging {what} with the other ranks"
        data = self.exchange.headers(
            [b"".join(self._header(pack, share) for pack in packs) for packs in sent],
            [int(sizes[packs].sum()) for packs in came],
            what=what,
        )
        headers = {}
        for packs, joined in zip(came, data, strict=True):
            at = 0
            for pack in packs:
                headers[pack] = joined[at : at + int(sizes[pack])]
                at += int(sizes[pack])
        return headers

    def _micro_batch(
        self, agreed: _Agreed, micro_step: int, share: Share, following: Share
    ) -> Produced:
        placement, me = agreed.placement, self.exchange.rank
        at = f"step {agreed.step} micro-step {micro_step}"
        self.doing = f"exchanging the packs of {at} with the other ranks"
        with self._on_stream():
            came = self._exchange_payloads(agreed, micro_step, share)
            moved = list(came)
            members = placement.cells[micro_step, me].tolist()
            joined = join([came.pop(p) if p in came else self._take(p, share) for p in members])
            batch = self._on_device(joined)
        num_images = placement.num_images[micro_step]
        batch.meta = joined.meta | {
            "step": agreed.step,
            "micro_step": micro_step,
            "dp_rank": me,
            "loss_tokens": agreed.loss_tokens,
            "num_images": int(num_images[me]),
            "ranks_without_images": int((num_images == 0).sum()),
        }
        is_last = micro_step + 1 == self.settings.micro_steps
        batch.step, batch.micro_step, batch.is_last_micro_step = agreed.step, micro_step, is_last
        return Produced(
            batch=batch,
            source_state=(following if is_last else share).state_before,
            step=agreed.step + is_last,
            micro_step=0 if is_last else micro_step + 1,
            moved_packs=len(moved),
            moved_bytes=int(placement.columns[moved, Column.PAYLOAD_BYTES].sum()),
        )

    def _exchange_payloads(
        self, agreed: _Agreed, micro_step: int, share: Share
    ) -> dict[int, MicroBatch]:
        """Packs that come to this rank in a micro-step, by number."""
        placement, me = agreed.placement, self.exchange.rank
        if not placement.moves(micro_step):
            return {}
        sizes = placement.columns[:, Column.PAYLOAD_BYTES]
        sent, received = placement.sent(micro_step, me), placement.received(micro_step, me)
        outgoing = [int(sizes[packs].sum()) for packs in sent]
        if len(self._send) < sum(outgoing):
            self._send = torch.empty(sum(outgoing), dtype=torch.uint8, device=self._send.device)
        at = 0
        for pack in _chained(sent):
            flat.write(self._take(pack, share), self._send[at : at + int(sizes[pack])])
            at += int(sizes[pack])
        payload = self.exchange.payloads(
            self._send[:at],
            outgoing,
            [int(sizes[packs].sum()) for packs in received],
            what=f"the packs of step {agreed.step} micro-step {micro_step}",
        )
        packs, at = {}, 0
        for pack in _chained(received):
            own = payload[at : at + int(sizes[pack])]
            packs[pack] = flat.read(agreed.headers[pack], own)
            at += len(own)
        return packs

    def _header(self, pack: int, share: Share) -> bytes:
        number = pack - self.exchange.rank * self.settings.packs_per_rank
        if 0 <= number < len(share.headers):
            return share.headers[number]
        return flat.describe(padding_of(share))

    def _take(self, pack: int, share: Share) -> MicroBatch:
        """A pack that this rank has, which is not kept any longer; each is taken once."""
        number = pack - self.exchange.rank * self.settings.packs_per_rank
        if not 0 <= number < len(share.packs):
            return padding_of(share)
        taken, share.packs[number] = share.packs[number], None
        assert taken is not None
        return taken

    def _on_device(self, joined: MicroBatch) -> MicroBatch:
        """A batch of its own with the tensors where they belong, complete."""
        batch = MicroBatch(joined)
        batch.__dict__.update(joined.__dict__)
        if self._stream is None:
            return batch
        for name, value in joined.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to(self.exchange.device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        deadline = time.monotonic() + self.exchange.timeout_s
        while not copied.query():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"rank {self.exchange.rank} waited {self.exchange.timeout_s:.3g} s for packs "
                    f"on {self.exchange.device}; another rank does not send"
                )
            time.sleep(DEVICE_POLL_S)
        return batch


def _chained(lists: Iterable[Sequence[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def _by_rank(steps: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Of each rank the packs of all steps, from lists [steps][ranks]."""
    return [_chained(lists) for lists in zip(*steps, strict=True)]


def _unlike_first(rows: NDArray[np.int64]) -> list[int]:
    """Ranks whose row differs from rank 0's."""
    return np.flatnonzero((rows != rows[0]).any(axis=1)).tolist()
