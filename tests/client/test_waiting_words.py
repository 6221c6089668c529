import logging
from typing import Any

import pytest

from dataservice.errors import ConfigError, ServiceUnavailable
from trainer_client import PackStream, ParallelLayout, patience

OPTIONS: dict[str, Any] = {"job": "any", "layout": ParallelLayout(), "micro_steps": 1}


@pytest.mark.parametrize("endpoint", ["localhost", "http://127.0.0.1:7070", "127.0.0.1:", ""])
def test_an_endpoint_that_is_none_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        PackStream(endpoint, **OPTIONS)


def test_a_trainer_without_a_service_says_so_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "FIRST_REMINDER_S", 0.2)
    with (
        caplog.at_level(logging.WARNING),
        PackStream("127.0.0.1:1", timeout_s=1.0, **OPTIONS) as stream,
        pytest.raises(ServiceUnavailable),
    ):
        next(stream)
    said = [record.getMessage() for record in caplog.records]
    assert any("rank 0 has waited" in text and "127.0.0.1:1" in text for text in said)
