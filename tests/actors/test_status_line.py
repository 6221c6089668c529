"""What `dataservice serve` prints where its output is no terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataservice.actors.ray_coordinator import RayCoordinator
from dataservice.actors.status_line import StatusLine


def test_the_page_is_named_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("127.0.0.1:7070", "http://127.0.0.1:7071/"):
        pass
    with StatusLine("127.0.0.1:7070"):
        pass
    assert capsys.readouterr().out.splitlines() == [
        "serving on 127.0.0.1:7070",
        "status page: http://127.0.0.1:7071/",
        "serving on 127.0.0.1:7070",
    ]


@pytest.mark.parametrize(
    ("endpoint", "port", "tls", "url"),
    [
        ("10.0.0.7:7070", 7071, None, "http://10.0.0.7:7071/"),
        ("[::1]:7070", 8443, object(), "https://[::1]:8443/"),
        ("10.0.0.7:7070", None, None, ""),
    ],
)
def test_the_page_is_where_the_coordinator_is(
    endpoint: str, port: int | None, tls: object, url: str
) -> None:
    config: Any = SimpleNamespace(serving=SimpleNamespace(tls=tls))
    coordinator = RayCoordinator(config)
    coordinator._endpoint, coordinator._http_port = endpoint, port
    assert coordinator.page_url == url
