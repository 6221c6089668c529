"""Bytes that change on their way: asked for again once, then an error, and never a wrong tensor."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from support.proof import nothing_leaks
from support.proxy import Proxy

from dataservice.errors import DamagedMessage, DataServiceError, WireError
from dataservice.rpc.channel import MAX_REQUEST_BYTES
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.sealing import sealed, unsealed
from dataservice.wire.messages import GetStatus, PackPlace, ScaleWorkers
from trainer_client import MicroBatch, PackStream, ParallelLayout
from trainer_client.testing import FakeService, synthetic_packs

PACKS = synthetic_packs(4, seed=7)
PACK = "0.0.2"
"""That of step 1, micro-step 0."""


class Damaging(FakeService):
    """Streams PACK with one byte wrong."""

    at: tuple[int, int] | None = None
    """Frame, and byte of it."""
    times = 0

    def frames(self, pack_id: str) -> Iterator[bytes]:
        wrong = pack_id == PACK and self.at is not None and self.times > 0
        self.times -= wrong
        for number, frame in enumerate(super().frames(pack_id)):
            if wrong and self.at is not None and number == self.at[0]:
                frame = bytearray(frame)
                frame[self.at[1]] ^= 1 << self.at[1] % 8
            yield bytes(frame)


@pytest.fixture
def service(caplog: pytest.LogCaptureFixture) -> Iterator[Damaging]:
    caplog.set_level("ERROR", "trainer_client")
    with Damaging(PACKS, frame_bytes=128) as service, nothing_leaks():
        yield service


def stream_of(endpoint: str, *, timeout_s: float = 20.0) -> PackStream:
    return PackStream(
        endpoint,
        job="test",
        layout=ParallelLayout.data_parallel(0, 1),
        micro_steps=2,
        digests=True,
        prefetch_packs=0,
        timeout_s=timeout_s,
    )


def digests_of(batch: MicroBatch) -> list[str]:
    digests: list[str] = batch.meta["digests"]
    return digests


def places(service: Damaging) -> list[tuple[int, int]]:
    """Each byte of the first frame, which has the header, and of the last."""
    frames = list(service.frames(PACK))
    return [(i, j) for i in (0, len(frames) - 1) for j in range(len(frames[i]))]


def test_every_byte_of_a_pack_wrong_once(service: Damaging) -> None:
    with stream_of(service.endpoint) as stream:
        right = digests_of(stream.get(1, 0))
        tried = places(service)
        for place in tried:
            service.at = place
            service.times = 1
            assert digests_of(stream.get(1, 0)) == right, service.at
        assert stream.stats().retries == len(tried)
    assert set(service.failed) <= set(service.workers)


def test_bytes_of_a_pack_that_stay_wrong(service: Damaging) -> None:
    with stream_of(service.endpoint) as stream:
        right = digests_of(stream.get(1, 0))
        for place in random.Random(1).sample(places(service), 50):
            service.at = place
            service.times = 2
            with pytest.raises(WireError):
                stream.get(1, 0)
            assert service.times == 0
        assert digests_of(stream.get(1, 0)) == right


# ---- control messages ---------------------------------------------------------------------------


def test_every_byte_of_a_control_message() -> None:
    """A digit that changes still makes a message: only the checksum tells."""
    place = PackPlace(pack_id="3.0.7", number=7, endpoint="10.0.0.1:7070", size_bytes=1000)
    data = sealed(place, max_bytes=MAX_REQUEST_BYTES)
    assert unsealed(PackPlace, data) == place
    for at in range(len(data)):
        for mask in (1, 0x80, 0xFF):
            wrong = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            with pytest.raises(DamagedMessage):
                unsealed(PackPlace, wrong)
    for size in range(len(data)):
        with pytest.raises(DamagedMessage):
            unsealed(PackPlace, data[:size])


def test_a_damaged_control_message_is_sent_once_more(
    service: Damaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, asked = [1], []

    def damage(cls: type, data: bytes) -> object:
        asked.append(cls)
        left[0] -= 1
        return unsealed(cls, data[:-1] + bytes([data[-1] ^ 1]) if left[0] >= 0 else data)

    monkeypatch.setattr("dataservice.rpc.server.unsealed", damage)
    with CoordinatorClient(service.endpoint) as client:
        with pytest.raises(DataServiceError, match="does not answer ScaleWorkers"):
            client.call(ScaleWorkers(workers=3), 10.0)
        assert asked == [ScaleWorkers] * 2
        left[0] = 2
        with pytest.raises(DamagedMessage, match="GetStatus: 5 bytes with a wrong checksum"):
            client.call(GetStatus(), 10.0)
        assert asked[2:] == [GetStatus] * 2


@pytest.mark.parametrize("to", ["client", "server"])
@pytest.mark.parametrize("every", [25, pytest.param(4, marks=pytest.mark.slow)])
def test_any_byte_of_a_connection_to_the_coordinator(
    service: Damaging, to: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP's payload, gRPC's own bytes included: the same packs, or an error that says why."""
    monkeypatch.setattr("trainer_client.session.GRACE_S", 0.5)
    monkeypatch.setattr("trainer_client.stream.POLL_S", 0.5)
    with stream_of(service.endpoint) as stream:
        right = [digests_of(stream.get(step, 0)) for step in range(2)]
    ends: Counter[str] = Counter()
    with Proxy(service.endpoint) as proxy:
        with stream_of(proxy.endpoint) as stream:
            stream.get(0, 0)
        total = proxy.passed[to]
        for at in range(0, total, every):
            proxy.flip_after(at, to=to)  # type: ignore[arg-type]
            try:
                with stream_of(proxy.endpoint, timeout_s=2.0) as stream:
                    got = [digests_of(stream.get(step, 0)) for step in range(2)]
            except DataServiceError as error:
                ends[f"{type(error).__name__}: {error}"[:100]] += 1
            else:
                assert got == right
                ends["the same packs"] += 1
            proxy.heal()
    print(dict(ends))
    assert ends["the same packs"] > 0.95 * len(range(0, total, every))
