"""Endpoint commands say what to do where no service answers."""

import http.server
import socket
import threading

import pytest
from typer.testing import CliRunner

from dataservice.cli.app import app
from dataservice.errors import ServiceUnavailable


def test_a_port_where_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(app, ["status", endpoint])
    assert isinstance(result.exception, ServiceUnavailable)
    assert "is `dataservice serve` running there?" in str(result.exception)


def test_the_port_of_the_status_page() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            endpoint = f"127.0.0.1:{server.server_address[1]}"
            with pytest.raises(ServiceUnavailable, match="that port speaks no gRPC"):
                CliRunner().invoke(app, ["status", endpoint], catch_exceptions=False)
        finally:
            server.shutdown()
            thread.join()
