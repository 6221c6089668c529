"""The text file with a stream's counters."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataservice.errors import ConfigError
from trainer_client import PackStream, ParallelLayout
from trainer_client.metrics import MetricsFile, prometheus_text
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
    assert all(s.labels == {"job": job, "dp_rank": "3"} for f in families for s in f.samples)
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
