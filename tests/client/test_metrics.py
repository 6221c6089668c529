"""The text with a stream's counters, in a file and over HTTP."""

from __future__ import annotations

import errno
import gc
import socket
import threading
import time
from contextlib import suppress
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.scrape import get, missing, one, samples_of

from dataservice.errors import ConfigError
from trainer_client import PackStream, ParallelLayout, metrics_server
from trainer_client.metrics import (
    WAITS_S,
    Counts,
    MetricsFile,
    StreamStats,
    prometheus_text,
    served_metrics,
)
from trainer_client.testing import FakeService, synthetic_packs

PACKS = synthetic_packs(6, seed=2)


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_file_has_what_the_stream_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank0.prom"
    with FakeService(PACKS) as service:
        with PackStream(
            service.endpoint, job="j", layout=ParallelLayout(), micro_steps=2, metrics_file=path
        ) as stream:
            next(stream)
            assert not path.exists()
            next(stream)
            first = values(path.read_text())
            assert first["dataservice_client_batches_total"] == 2
            assert len(list(stream)) == 4
        stats = stream.stats()
    found = values(path.read_text())
    assert found["dataservice_client_batches_total"] == stats.batches == 6
    assert found["dataservice_client_steps_total"] == stats.steps == 3
    assert found["dataservice_client_waited_seconds_total"] == stats.waited_s > 0
    assert found["dataservice_client_received_bytes_total"] == stats.received_bytes
    assert 'batches_total{job="j",dp_rank="0",peer="0"} 6\n' in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_labels_are_escaped() -> None:
    with FakeService(PACKS) as service:
        stats = PackStream(
            service.endpoint, job="j", layout=ParallelLayout(), micro_steps=1
        ).stats()
    job = 'a "b"\\\n'
    text = prometheus_text(stats, {"job": job, "dp_rank": 3})
    families = list(text_string_to_metric_families(text))
    labels = [{k: v for k, v in s.labels.items() if k != "le"} for f in families for s in f.samples]
    assert all(found == {"job": job, "dp_rank": "3"} for found in labels)
    assert all(family.documentation for family in families)


def test_a_folder_that_goes_away_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    file = MetricsFile(folder / "x.prom", {})
    folder.rmdir()
    with FakeService(PACKS) as service:
        stream = PackStream(service.endpoint, job="j", layout=ParallelLayout(), micro_steps=1)
    file.write(stream.stats())
    assert "cannot be written" in caplog.text
    folder.touch()  # and something else comes in its place
    file.write(stream.stats())


def test_a_disk_that_is_full_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with FakeService(PACKS) as service:
        with PackStream(
            service.endpoint,
            job="j",
            layout=ParallelLayout(),
            micro_steps=2,
            metrics_file=tmp_path / "x.prom",
        ) as stream:
            assert len(list(stream)) == 6
    assert "No space left" in caplog.text and list(tmp_path.iterdir()) == []


def test_places_for_no_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "x.prom"):
        with pytest.raises(ConfigError, match="metrics_file"):
            MetricsFile(path, {})


def test_the_server_has_what_the_stream_counted() -> None:
    with FakeService(PACKS) as service:
        with PackStream(
            service.endpoint, job="j", layout=ParallelLayout(), micro_steps=2, metrics_port=0
        ) as stream:
            address = stream.metrics_address
            assert address.startswith("127.0.0.1:")
            for _ in range(3):
                next(stream)
            found = samples_of(get(f"http://{address}/metrics").decode(), "client")
            stats = stream.stats()
            assert not missing(found, "client")
            assert one(found, "client_batches_total") == stats.batches == 3
            assert one(found, "client_steps_total") == stats.steps == 1
            assert one(found, "client_waited_seconds_total") == stats.waited_s > 0
            assert one(found, "client_wait_seconds_count") == sum(stats.waits) == 3
            assert one(found, "client_wait_seconds_sum") == stats.waited_s
            assert one(found, "client_wait_seconds_bucket", le="60.0") == 3
            with pytest.raises(HTTPError, match="404"):
                get(f"http://{address}/")
        with pytest.raises(URLError):
            get(f"http://{address}/metrics")
    assert not [t for t in threading.enumerate() if t.name == "pack-metrics"]


def test_waits_are_counted_by_their_length() -> None:
    counts = Counts()
    assert counts.note(0.0, ends_step=False) == 0
    assert counts.note(0.02, ends_step=True) == pytest.approx(0.02)
    assert counts.note(1000.0, ends_step=False) == 1000
    assert counts.step_waited_s == pytest.approx(0.02) and counts.steps == 1
    by_bound = dict(zip((*WAITS_S, None), counts.waits, strict=True))
    assert (by_bound[0.001], by_bound[0.025], by_bound[None]) == (1, 1, 1)
    assert sum(counts.waits) == counts.batches == 3


def test_a_port_in_use_is_refused() -> None:
    with FakeService(PACKS) as service:
        first = served(service, metrics_port=0)
        port = int(first.metrics_address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"metrics_port is {port}: .*in use"):
            served(service, metrics_port=port)
        with pytest.raises(ConfigError, match="metrics_port is 70000"):
            served(service, metrics_port=70000)
        first.close()
        first.close()


def test_a_stream_that_nobody_closed_takes_its_server_along() -> None:
    with FakeService(PACKS) as service:
        address = served(service, metrics_port=0).metrics_address
        gc.collect()
        with pytest.raises(URLError):
            get(f"http://{address}/metrics")


def test_a_request_without_an_end_holds_up_others_for_a_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.3)
    with FakeService(PACKS) as service:
        with served(service, metrics_port=0) as stream:
            host, port = stream.metrics_address.split(":")
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall(b"GET /metr")
                assert get(f"http://{stream.metrics_address}/metrics")
                assert slow.recv(100) == b""
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall(b"GET /metr")
                monkeypatch.setattr(metrics_server, "REQUEST_S", 60.0)
                before = time.monotonic()
                stream.close()
                assert time.monotonic() - before < 5


class Last:
    """Has nobody but who asks it."""

    def __init__(self, kept: list[Last]) -> None:
        kept.append(self)
        self._kept = kept

    def stats(self) -> StreamStats:
        self._kept.clear()
        with FakeService(PACKS) as service:
            return served(service).stats()


def test_a_stream_that_its_own_server_had_last_takes_it_along() -> None:
    kept: list[Last] = []
    server = served_metrics(Last(kept), {"job": "j"}, host="127.0.0.1", port=0)
    with suppress(RemoteDisconnected):  # the server may end before its answer is out
        get(f"http://{server.address}/metrics")
    assert not kept
    until = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name.startswith("pack-metrics")]:
        assert time.monotonic() < until, "the server's thread waits for itself"
        time.sleep(0.02)
    with pytest.raises(URLError):
        get(f"http://{server.address}/metrics")


def test_no_name_of_the_host_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name service that takes seconds."""
    monkeypatch.setattr(socket, "getfqdn", lambda _name="": pytest.fail("a look-up"))
    with FakeService(PACKS) as service, served(service, metrics_port=0) as stream:
        assert stream.metrics_address.startswith("127.0.0.1:")


def served(service: FakeService, **options: Any) -> PackStream:
    return PackStream(service.endpoint, job="j", layout=ParallelLayout(), micro_steps=1, **options)
