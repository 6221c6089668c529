"""A watcher of a server's health, as a load balancer has one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def watched_health(endpoint: str) -> Iterator[list[int]]:
    """The states told so far, in order; filled by a thread until the block ends."""
    told: list[int] = []
    with grpc.insecure_channel(endpoint) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=""), timeout=300
        )

        def watch() -> None:
            try:
                for state in states:
                    told.append(state.status)
            except grpc.RpcError:
                pass  # the server has ended, or the block

        thread = threading.Thread(target=watch, name="health")
        thread.start()
        try:
            yield told
        finally:
            states.cancel()
            thread.join(10)
