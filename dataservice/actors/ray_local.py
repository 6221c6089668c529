"""How this project starts and joins Ray, with every default that matters set on purpose.

Invariants: a Ray of our own listens on loopback only and asks for a token that is made for it and
lives in the environment of its processes, never on disk; its processes and the folder of its logs
and sockets go with it, also where it was killed; no usage report is sent; a cluster that is already
on the machine is joined only when its address is given.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataservice.actors.own_folder import own_folder
from dataservice.actors.ray_guard import guarded
from dataservice.actors.worker_memory import ENVIRONMENT

_LOG = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def ray_environment() -> None:
    """For a Ray of this machine alone; must be called before Ray is imported. Whatever this process
    and that Ray start gets it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray's own switch for "one machine only": nodes name themselves by the loopback address
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    token_given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if os.environ["RAY_AUTH_MODE"] == "token" and not token_given:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def warn_of_open_cluster(address: str) -> None:
    """Ray runs what those who reach its ports send it, unless it asks them for a token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        _LOG.warning(
            "Ray at %s is joined without a token of Ray's: whoever reaches its ports can run code "
            "on its nodes; start every node with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, and "
            "this command too",
            address,
        )


@contextmanager
def joined_ray(address: str | None, *, resource: str, num_cpus: int | None = None) -> Iterator[Any]:
    """The ray module, connected: to the cluster at `address`, or to a local one of our own."""
    if address is None:
        ray_environment()
    else:
        warn_of_open_cluster(address)
    import ray

    if address is not None:
        try:
            ray.init(address=address, log_to_driver=True)
            yield ray
        finally:
            ray.shutdown()
        return
    with own_folder("ray-") as own_files, guarded(own_files):
        try:  # also what was begun: at its exit Ray would make the folder anew
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                resources={resource: 1.0},
                _node_ip_address=LOOPBACK,
                _temp_dir=own_files,
                log_to_driver=True,
            )
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def local_cluster(data_nodes: int, *, resource: str, num_cpus: int) -> Iterator[Any]:
    """A Ray of our own with a head and `data_nodes` nodes on this machine; yields Ray's Cluster."""
    ray_environment()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": num_cpus, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(data_nodes):
            cluster.add_node(num_cpus=num_cpus, resources={resource: 1})
        yield cluster
    finally:
        cluster.shutdown()
